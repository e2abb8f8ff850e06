"""The bench of the whole mesh: its loads, its arithmetic, and one small run of all of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.tools.load.token_server import Script, completion, serving

from penstock.bench.e2e import ablations, figures, processes
from penstock.bench.e2e.cells import LoadCell, cells, values
from penstock.bench.e2e.loads import AgentLoad, CodingLoad, FanOutLoad, LoadStage, MixedLoad, PlainLoad
from penstock.bench.e2e.measure import CELLS, E2eOptions, concerned
from penstock.bench.e2e.processes import Mapped
from penstock.bench.e2e.report import E2eReport
from penstock.bench.e2e.servers import PEERS, USUAL, sittings
from penstock.bench.e2e.subjects import ServerRow, ServerSample, Sources, opened
from penstock.bench.engine.shapes import BIG, SMALL
from penstock.bench.engine.subjects import Places
from penstock.bench.measured.document import section
from penstock.load.asking import AskFailed
from penstock.load.records import LoadRecord
from penstock.load.target import LoadTarget
from penstock.models import embedded
from penstock.runtime.config import ConfigError


def told(asked, times, number=1, prompt=10, cached=0):
    """A request whose tokens came at these times, those of one time together."""
    parts = [times.count(at) for at in dict.fromkeys(times)]
    return LoadRecord(
        session="s",
        number=number,
        scheduled=asked,
        sent=asked,
        first=times[0],
        last=times[-1],
        ended=times[-1],
        gaps=[later - earlier for earlier, later in pairwise(dict.fromkeys(times))],
        sizes=parts,
        prompt_tokens=prompt,
        output_tokens=len(times),
        cached_tokens=cached,
    )


async def played(load, salt="x/1"):
    """The parts of a load before a server that answers at once, and what it was asked."""
    script = Script(completion)
    async with serving(script) as port:
        stage = LoadStage(LoadTarget(host="127.0.0.1", port=port, tls=False, prefix="/v1", endpoint="completions"), 900)
        return await load.run(stage, salt), script


def by_session(script):
    found = {}
    for body, session in zip(script.asked, script.sessions, strict=True):
        found.setdefault(session, []).append(body["prompt"])
    return found


async def test_agents_share_a_beginning_and_send_everything_again():
    turns, script = await played(AgentLoad(sessions=3, turns=2, system=32, new=20, output=2))
    assert [len(part) for part in turns.values()] == [3, 3] and list(turns) == ["turn1", "turn2"]
    prompts = by_session(script)
    assert len(prompts) == 3
    assert len({tuple(first[:32]) for first, _ in prompts.values()}) == 1
    assert len({tuple(first[32:]) for first, _ in prompts.values()}) == 3
    for first, second in prompts.values():
        assert len(first) == 52 and len(second) == 74 and second[:54] == [*first, 1000, 1001]
        assert all(300 <= id < 900 for id in first)
    assert all(record.prompt_tokens == record.planned_tokens for part in turns.values() for record in part)


async def test_children_have_their_parents_context_and_run_beside_each_other():
    found, script = await played(FanOutLoad(children=4, system=32, new=20, output=2))
    parent, *children = script.asked
    assert len(found["children"]) == 4 and len(found["parent"]) == 1
    assert all(body["prompt"][:54] == [*parent["prompt"], 1000, 1001] for body in children)
    assert all(len(body["prompt"]) == 74 for body in children)
    assert len({tuple(body["prompt"]) for body in children}) == 4 and len(set(script.sessions)) == 5
    assert {record.scheduled for record in found["children"]} == {found["parent"][0].ended}


async def test_long_prompts_come_one_by_one_and_only_beside_streams():
    """The streams' last tokens come when two long prompts have been answered."""
    long = asyncio.Event()

    async def hold(body, script):
        if len(body["prompt"]) == 30:
            await long.wait()
        elif len(script.asked) == 4:
            long.set()

    script = Script(completion, hold=hold)
    async with serving(script) as port, asyncio.timeout(60):
        stage = LoadStage(LoadTarget(host="127.0.0.1", port=port, tls=False, prefix="/v1", endpoint="completions"), 900)
        found = await MixedLoad(streams=2, prompt=30, output=9, long=64, long_output=1).run(stage, "x")
    assert [len(body["prompt"]) for body in script.asked][:4] == [30, 30, 64, 64]
    assert len(found["streams"]) == 2 and len(found["long"]) >= 2
    for before, after in pairwise(found["long"]):
        assert after.planned_tokens == 64 and before.good
    assert len(set(script.sessions)) == len(script.sessions)


async def test_prompts_are_the_same_for_the_same_seed_and_differ_otherwise():
    load = PlainLoad(streams=2, prompt=20, output=1)
    prompts = [{tuple(body["prompt"]) for body in (await played(load, seed))[1].asked} for seed in ("a", "a", "b")]
    assert prompts[0] == prompts[1] and not prompts[0] & prompts[2]


async def test_an_answer_that_is_too_short_ends_a_load():
    script = Script(lambda body: completion(body | {"max_tokens": 3}))
    async with serving(script) as port:
        stage = LoadStage(LoadTarget(host="127.0.0.1", port=port, tls=False, prefix="/v1", endpoint="completions"), 900)
        with pytest.raises(AskFailed, match="3 tokens came instead of 5"):
            await AgentLoad(sessions=3, turns=4, system=32, new=20, output=5).run(stage, "x")
    assert len(script.asked) <= 3


def test_coding_agents_fit_into_the_context_and_go_on_with_what_was_said():
    load = CodingLoad(sessions=16, turns=12)
    plan = load.plan()
    turns = [turn for session in plan.sessions for turn in session.turns]
    assert len(plan.sessions) > 8 and len(turns) > 100
    assert max(turn.tokens + turn.output for turn in turns) <= load.context
    assert max(turn.think_s for turn in turns) == load.max_think_s
    assert sum(turn.reusable for turn in turns) > 0.8 * sum(turn.tokens for turn in turns)


def test_values_have_aiperfs_names():
    first = told(0.0, [0.5, 0.6, 0.6, 0.8], prompt=100, cached=75)
    second = told(0.1, [0.3, 1.1], 2, prompt=100)
    found = values({"turn1": [first], "turn2": [second]})
    assert found["output_token_throughput"] == pytest.approx(6 / 1.1)
    assert found["time_to_first_token_turn1_p50"] == pytest.approx(500)
    assert found["time_to_first_token_turn2_p50"] == pytest.approx(200)
    assert found["time_to_first_token_p50"] == pytest.approx(350)
    assert found["inter_token_latency_max"] == pytest.approx(800)
    assert found["inter_token_latency_avg"] == pytest.approx((100 + 800) / 2)
    assert found["inter_token_gap_p50"] == pytest.approx(150), "100, 0, 200 and 800"
    assert found["request_latency_max"] == pytest.approx(1000)
    assert found["cached_share"] == pytest.approx(75 / 200) and found["refusals"] == 0


def test_gaps_of_streams_leave_the_long_prompts_out():
    found = values({"streams": [told(0.0, [0.1, 0.2])], "long": [told(0.0, [5.0, 9.0])]})
    assert found["inter_token_gap_streams_p90"] == pytest.approx(100)
    assert found["inter_token_gap_max"] == pytest.approx(4000)


def samples(*rates, value="output_token_throughput"):
    return [ServerSample({value: rate}) if rate else ServerSample(reason="it failed") for rate in rates]


def rows(value="output_token_throughput", cell="agents_8", **servers):
    """One row for each server; those of a tuple are its rounds."""
    made = {name: samples(*rates, value=value) for name, rates in servers.items()}
    return [ServerRow(cell, name, of, made["mesh"]) for name, of in made.items()]


def found(rows, id):
    return next(figure for figure in figures.compared(rows) if figure.id == id)


def test_the_best_peer_is_the_one_beside_which_ours_looks_worst():
    ours = {"mesh": (60, 90, 80), "mesh_aggregated": (900, 900, 900)}
    theirs = {"vllm": (40, 60, 60), "openvino": (50, 60, 90), "llamaserver": (0, 0, 0)}
    figure = found(rows(**ours, **theirs), "agent_tokens_per_s_vs_best_8")
    assert (figure.value, figure.min, figure.max, figure.met) == (1.2, pytest.approx(80 / 90), 1.5, True)
    assert figure.against == "best peer: openvino; without llamaserver: it failed"


def test_where_less_is_better_the_best_peer_has_the_least():
    measured = rows("time_to_first_token_turn2_p50", mesh=(30,), vllm=(100,), openvino=(50,))
    figure = found(measured, "agent_turn2_ttft_vs_best_8")
    assert figure.value == pytest.approx(0.6) and figure.met is False


def test_without_peers_the_figure_is_missing_and_says_why():
    figure = found(rows(mesh=(60,), vllm=(0,)), "agent_tokens_per_s_vs_best_8")
    assert figure.value is None and figure.against == "vllm: it failed"


def test_an_incident_happens_to_those_it_concerns_or_that_are_named():
    assert concerned("rest", ()) == ["mesh", *PEERS]
    assert concerned("shared_prefix", ()) == ["mesh"]
    assert concerned("rest", ("mesh_turns", "vllm")) == ["mesh_turns", "vllm"]


def test_a_first_turn_after_a_rest_is_compared():
    measured = rows("time_to_first_token_after_rest", "rest", mesh=(300,), vllm=(600,))
    assert found(measured, "agent_turn1_ttft_after_rest_vs_best").value == 0.5


def test_a_restart_is_compared_and_memory_stands_alone():
    measured = rows("time_to_first_token_after_restart", "restart", mesh=(30,), vllm=(600,))
    figure = found(measured, "agent_turn_ttft_after_restart_vs_best")
    assert figure.value == pytest.approx(0.05) and figure.met is True
    own = figures.shared_prefix(rows("memory_vs_own_part", "shared_prefix", mesh=(1.5,)), "_1b")
    assert [(each.id, each.value) for each in own] == [("shared_prefix_memory_ratio_1b", 1.5)]


def test_the_document_has_every_comparison():
    everything = ServerSample({each.value: 30.0 for each in figures.COMPARED})
    names = dict.fromkeys(each.cell for each in figures.COMPARED)
    found = [ServerRow(cell, server, [everything], [everything]) for cell in names for server in ("mesh", "vllm")]
    text = section(E2eReport("e2e", figures.compared(found), found).json())
    table = [line for line in text.splitlines() if line.endswith("| vllm |")]
    assert len(table) == len(figures.COMPARED) and all("| 1.00 | 1.00 to 1.00 |" in line for line in table)


def test_ablations_are_without_a_part_beside_with_it_and_stand_in_the_document():
    on = [dict.fromkeys(ablations.COMPARED.values(), 2.0)] * 3
    off = [dict.fromkeys(ablations.COMPARED.values(), factor) for factor in (1.0, 3.0, 2.0)]
    found = [one for ablation in ablations.ABLATIONS for one in ablations.ratios(ablation, on, off)]
    by_id = {one.id: one for one in found}
    assert (by_id["ablation_store_turn2_ttft"].value, by_id["ablation_store_turn2_ttft"].min) == (1.0, 0.5)
    assert by_id["ablation_draft_off_tokens_per_s"].max == 3.0
    text = section(E2eReport("e2e", found).json())
    for ablation in ablations.ABLATIONS:
        assert f"| {ablation.name.replace('_', ' ')} | {ablation.words} | 1.00 (0.50 to 1.50) |" in text
    assert "--ablations" not in section(E2eReport("e2e", []).json())


def test_servers_that_do_not_fit_into_memory_together_take_sittings_with_the_mesh():
    assert sittings(USUAL, SMALL, 1 << 28) == [USUAL]
    groups = sittings(USUAL, BIG, 5 << 29)
    assert len(groups) > 1 and all(group[0] == "mesh" for group in groups)
    assert sorted(name for group in groups for name in group[1:]) == sorted(USUAL[1:])
    assert sittings(["vllm", "openvino"], BIG, 5 << 29, budget=1) == [("vllm",), ("openvino",)]


def test_a_round_that_failed_is_left_out_of_the_ratios():
    figure = found(rows(mesh=(60, 0, 90), vllm=(30, 30, 30)), "agent_tokens_per_s_vs_best_8")
    assert (figure.value, figure.min, figure.max) == (2.5, 2.0, 3.0)


def test_every_comparison_is_of_a_cell_that_is_measured():
    names = {cell.name for cell in cells(quick=False)}
    assert {each.cell for each in figures.COMPARED} <= set(CELLS)
    assert [cell.name for cell in cells(quick=False, wanted=["plain_8", "agents_1"])] == ["agents_1", "plain_8"]
    assert {cell.name for cell in cells(quick=True)} <= names


@pytest.mark.parametrize("setting", ["cells", "servers"])
def test_a_name_that_there_is_not_is_refused(setting):
    with pytest.raises(ConfigError, match=f"{setting}.*'other'.*must be one of"):
        E2eOptions(**{setting: ("other",)})


def test_cells_of_ablations_are_the_parts():
    assert E2eOptions(ablations=True, cells=("draft",)).cells == ("draft",)
    with pytest.raises(ConfigError, match=r"cells.*'agents_8'.*must be one of affinity, store"):
        E2eOptions(ablations=True, cells=("agents_8",))


def test_memory_that_is_shared_counts_once():
    library = Mapped("/usr/lib/torch.so", 100, 30)
    processes_of_one = [
        [library, Mapped("/models/weights", 500, 100), Mapped("", 40, 40), Mapped("/memfd:arena (deleted)", 200, 100)],
        [library, Mapped("/models/weights", 300, 60), Mapped("[heap]", 10, 10), Mapped("/dev/shm/a", 200, 100)],
    ]
    assert processes.together(processes_of_one) == 100 + 500 + 40 + 10 + 100 + 100


def test_a_tree_of_processes_is_found_measured_and_counted_after_its_end():
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\nprint(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdout.readline()
        assert child.pid in processes.tree(os.getpid()) and processes.tree(child.pid) == [child.pid]
        assert processes.cpu_s([child.pid]) >= 0.2, "of the process that has ended"
        assert 1 << 20 < processes.memory_bytes([child.pid]) < 1 << 30
        assert processes.named([child.pid], "-c") == [child.pid] and not processes.named([child.pid], "other")
    finally:
        child.communicate(b"\n")
    assert processes.tree(child.pid) == [] and processes.memory_bytes([child.pid]) == 0


def test_the_report_is_json():
    measured = [*rows(mesh=(60,), vllm=(30,)), *rows(mesh=(80,), openvino=(20,))]
    report = E2eReport("e2e", [*figures.compared(measured), *figures.scales(measured, "135m")], measured)
    by_id = {figure.id: figure for figure in report.figures}
    assert by_id["agents_8_135m_mesh_output_token_throughput"].value == 70, "of both sittings"
    assert by_id["agent_tokens_per_s_vs_best_8"].against == "best peer: vllm"
    ids = {figure["id"] for figure in json.loads(report.json())["figures"]}
    assert {"agent_tokens_per_s_vs_best_8", "agents_8_135m_vllm_output_token_throughput"} <= ids


async def test_a_mesh_is_measured_and_a_peer_that_is_not_there_is_left_out(tmp_path):
    model = embedded("penstock-mini")
    config = json.loads((model / "config.json").read_text())
    shape = replace(SMALL, vocab=config["vocab_size"])
    cell = LoadCell("agents_2", AgentLoad(sessions=2, turns=2, system=96, new=16, output=8))
    sources = Sources(shape, model, Places(tmp_path))
    async with opened(["mesh_aggregated", "vllm"], sources) as subjects:
        mesh = await subjects.sample("mesh_aggregated", cell, shape, 1)
        peer = await subjects.sample("vllm", cell, shape, 1)
        pids = subjects.running["mesh_aggregated"].pids
    assert "not installed: python -m loadtest.peers.install vllm" in peer.reason and not peer.values
    assert not mesh.reason and mesh.values["output_token_throughput"] > 0
    assert mesh.values["cached_share"] > 0.3, "the second turns begin with the first"
    assert mesh.values["cpu_s_per_1k"] > 0 and mesh.values["memory_mb"] > 50
    assert len(pids) > 4 and not any(map(processes.tree, pids)), "all of its processes have ended"

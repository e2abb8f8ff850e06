"""The bench of the whole mesh: its client, its loads, its arithmetic, and one small run of all of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.tools.bench.sse_server import Script, completion, event, serving

from penstock.bench.e2e import figures, processes
from penstock.bench.e2e.answers import TimedAnswer, output_token_throughput, percentile
from penstock.bench.e2e.cells import LoadCell, cells, values
from penstock.bench.e2e.client import AskFailed, TimedClient
from penstock.bench.e2e.dialects import LlamaServer, OpenAi
from penstock.bench.e2e.loads import AgentLoad, FanOutLoad, MixedLoad, PlainLoad, PromptSource
from penstock.bench.e2e.measure import CELLS, E2eOptions, concerned
from penstock.bench.e2e.processes import Mapped
from penstock.bench.e2e.report import E2eReport
from penstock.bench.e2e.servers import PEERS, USUAL, sittings
from penstock.bench.e2e.subjects import ServerRow, ServerSample, Sources, opened
from penstock.bench.engine.shapes import BIG, SMALL
from penstock.bench.engine.subjects import Places
from penstock.bench.measured.document import section
from penstock.models import embedded
from penstock.runtime.config import ConfigError


def client(port, dialect=None, **more):
    return TimedClient("127.0.0.1", port, dialect or OpenAi("m"), **more)


async def test_tokens_are_taken_with_their_times_and_the_usage():
    script, begun = Script(completion), []
    async with serving(script) as port:
        answer = await client(port).ask([7, 8, 9], 5, "s-1", lambda: begun.append(1))
    assert answer.ids == [1000, 1001, 1002, 1003, 1004] and begun == [1]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.refusals) == (3, 16, 0)
    assert len(answer.times) == 5 and answer.times == sorted(answer.times)
    assert 0 < answer.time_to_first_token <= answer.request_latency
    assert script.sessions == ["s-1"]
    asked = script.asked[0]
    assert (asked["prompt"], asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == ([7, 8, 9], 5, True, 0)


async def test_events_may_come_in_any_pieces():
    def writes(body):
        text = b"".join(completion(body))
        return [text[at : at + 7] for at in range(0, len(text), 7)]

    async with serving(Script(writes)) as port:
        answer = await client(port).ask([7], 6, "s")
    assert answer.ids == list(range(1000, 1006)) and answer.prompt_tokens == 1


async def test_the_events_of_llama_server():
    def writes(body):
        last = {"stop": True, "tokens": [], "tokens_evaluated": 9, "timings": {"cache_n": 4}}
        return [*(event({"stop": False, "tokens": [id]}) for id in range(body["n_predict"])), event(last)]

    async with serving(Script(writes)) as port:
        answer = await client(port, LlamaServer()).ask([1], 3, "s")
    assert (answer.ids, answer.prompt_tokens, answer.cached_tokens) == ([0, 1, 2], 9, 4)


async def test_a_refusal_is_tried_again_and_its_time_counts():
    refusals = [(503, "retry-after: 0\r\n"), (429, "retry-after: 0\r\n")]
    async with serving(Script(completion, refusals)) as port:
        answer = await client(port).ask([7], 2, "s")
    assert answer.refusals == 2 and len(answer.ids) == 2


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Script(completion, [(400, "")]), "status 400: busy"),
        (Script(lambda body: completion(body | {"max_tokens": 3})), "3 tokens came instead of 4"),
        (Script(lambda body: completion(body)[:2], cut=True), "3 tokens came instead of 4"),
        (Script(lambda body: [b"data: " + b"x" * 9], [(503, "")]), "no whole answer within 0 s"),
    ],
)
async def test_what_is_no_whole_answer_fails(script, said):
    async with serving(script) as port:
        with pytest.raises(AskFailed, match=said):
            await client(port, limit_s=0.3).ask([7], 4, "s")


async def test_a_server_that_is_not_there():
    async with serving(Script(completion)) as port:
        pass
    with pytest.raises(AskFailed, match="no connection"):
        await client(port).ask([7], 4, "s")


def told(asked, times, prompt=10, cached=0):
    return TimedAnswer(asked, list(range(len(times))), list(times), prompt, cached)


class Recorder:
    """Answers at once, and keeps who was asked what."""

    def __init__(self):
        self.asked = []
        self.live = 0
        self.most = 0

    async def __call__(self, prompt, tokens, session, begun=lambda: None):
        self.asked.append((tuple(prompt), tokens, session))
        self.live += 1
        self.most = max(self.most, self.live)
        for _ in range(tokens):
            await asyncio.sleep(0)
        begun()
        self.live -= 1
        return TimedAnswer(0.0, [5] * tokens, [1.0] * tokens)


async def test_agents_share_a_beginning_and_send_everything_again():
    ask = Recorder()
    turns = await AgentLoad(sessions=3, turns=2, system=20, new=4, output=2).run(ask, PromptSource(900, "x/1"))
    assert [len(part) for part in turns.values()] == [3, 3] and list(turns) == ["turn1", "turn2"]
    assert ask.most == 3
    by_session = {}
    for prompt, _, session in ask.asked:
        by_session.setdefault(session, []).append(prompt)
    assert len(by_session) == 3
    assert len({prompts[0][:20] for prompts in by_session.values()}) == 1
    assert len({prompts[0][20:] for prompts in by_session.values()}) == 3
    for first, second in by_session.values():
        assert second[:26] == (*first, 5, 5) and len(second) == 30


async def test_children_have_their_parents_context():
    ask = Recorder()
    found = await FanOutLoad(children=4, system=20, new=4, output=2).run(ask, PromptSource(900, "x"))
    parent, *children = ask.asked
    assert len(found["children"]) == 4 == ask.most
    assert all(prompt[:26] == (*parent[0], 5, 5) and len(prompt) == 30 for prompt, _, _ in children)
    assert len({prompt for prompt, _, _ in children}) == 4


async def test_long_prompts_come_only_beside_streams():
    ask = Recorder()
    load = MixedLoad(streams=2, prompt=3, output=9, long=30, long_output=1)
    found = await load.run(ask, PromptSource(900, "x"))
    lengths = [len(prompt) for prompt, _, _ in ask.asked]
    assert lengths[:2] == [3, 3] and set(lengths[2:]) <= {30} and len(found["streams"]) == 2


async def test_prompts_are_the_same_for_the_same_seed_and_differ_otherwise():
    async def prompts(seed):
        ask = Recorder()
        await PlainLoad(streams=2, prompt=8, output=1).run(ask, PromptSource(900, seed))
        return [prompt for prompt, _, _ in ask.asked]

    first, again, other = await prompts("a"), await prompts("a"), await prompts("b")
    assert first == again and not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in other}


async def test_the_first_error_ends_a_load():
    async def ask(prompt, tokens, session, begun=None):
        raise AskFailed("no")

    with pytest.raises(AskFailed, match="no"):
        await PlainLoad(streams=3).run(ask, PromptSource(900, "x"))


def test_values_have_aiperfs_names():
    first = told(0.0, [0.5, 0.6, 0.6, 0.8], prompt=100, cached=75)
    second = told(0.1, [0.3, 1.1], prompt=100)
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


def test_percentiles_and_throughput():
    assert [percentile([4, 1, 3, 2], percent) for percent in (0, 50, 90, 100)] == [1, 2.5, 3.7, 4]
    assert output_token_throughput([told(1.0, [2.0]), told(2.0, [2.5, 5.0])]) == pytest.approx(3 / 4)


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


def test_memory_that_is_shared_counts_once():
    library = Mapped("/usr/lib/torch.so", 100, 30)
    processes_of_one = [
        [library, Mapped("/models/weights", 500, 100), Mapped("", 40, 40), Mapped("/memfd:arena (deleted)", 200, 100)],
        [library, Mapped("/models/weights", 300, 60), Mapped("[heap]", 10, 10), Mapped("/dev/shm/a", 200, 100)],
    ]
    assert processes.together(processes_of_one) == 100 + 500 + 40 + 10 + 100 + 100


def test_a_tree_of_processes_is_found_measured_and_counted_after_its_end():
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
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

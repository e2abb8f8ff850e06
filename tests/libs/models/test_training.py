"""Training: growth keeps the function, a killed run goes on, and what comes out is an ordinary checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open

from penstock.models import NAMES, embedded
from penstock.models.evaluate import accepted_share
from penstock.models.export import load
from penstock.models.generate import generate
from penstock.models.grow import deepen, widen, with_heads
from penstock.models.induction import initialise
from penstock.models.net import Net, NetShape, parameters
from penstock.models.optim import Optimizer, orthogonalise
from penstock.models.presets import HEADS, PRESETS
from penstock.models.teach import HeadTrainer, Lesson, acceptance, export_head, load_head
from penstock.models.train import computing_clock
from penstock.models.trials import COLUMNS, TRIALS, run_trial

SMALL = NetShape(3, 64, 96, 2, 2, vocabulary=200, head=32)


def ids(count: int, vocabulary: int = 200) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_the_model_and_gives_the_same_logits(name):
    from transformers import AutoModelForCausalLM

    net, _ = load(embedded(name))
    model = AutoModelForCausalLM.from_pretrained(embedded(name), dtype=torch.float32).eval()
    prompt = ids(300, 4096)
    with torch.no_grad():
        assert torch.allclose(model(prompt).logits, net(prompt), atol=1e-4)
    assert model.generation_config.eos_token_id == 2


def test_the_pair_keeps_its_sizes():
    target, draft = (parameters(PRESETS["mini"].target.shape), parameters(PRESETS["mini"].draft.shape))
    assert 5e6 <= target <= 12e6 and draft <= target / 4
    assert sum(f.stat().st_size for n in NAMES for f in embedded(n).iterdir()) < 28e6


def test_an_untrained_network_already_copies():
    net = Net(NetShape(2, 256, 64, 4, 4, vocabulary=1000))
    initialise(net, 0)
    half = ids(60, 1000)
    with torch.no_grad():
        best = net(torch.cat([half, half], 1))[0].argmax(-1)
    assert (best[63:-1] == half[0, 4:]).float().mean() > 0.6


def test_a_grown_network_computes_the_same_function():
    small = Net(SMALL)
    initialise(small, 0)
    deep = deepen(small, (0, 1, 3), seed=1)
    large = widen(deep, seed=1)
    more = with_heads(deep, 4, seed=1)
    assert deep.shape.layers == 4 and large.shape.layers == 4 and large.shape.width == 128 and more.shape.heads == 4
    with torch.no_grad():
        assert torch.allclose(small(ids(50)), deep(ids(50)), atol=1e-4)
        assert torch.allclose(small(ids(50)), large(ids(50)), atol=1e-4)
        assert torch.allclose(small(ids(50)), more(ids(50)), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in TRIALS if name != "plan"])
def test_a_trial_changes_one_thing(name):
    trial, base = TRIALS[name], PRESETS["mini"].pole
    changed = asdict(trial.plan(base))
    differs = [field for field, value in asdict(base).items() if changed[field] != value]
    start = Net(SMALL)
    grown = trial.start(start).shape != start.shape
    assert (differs, grown) in (
        [([field], False) for field in ("emphasis", "stages", "rate", "batch")] + [([], True), (["rate"], True)]
    )


def test_a_trial_trains_on_and_is_measured(tmp_path):
    steps = []
    found = run_trial(
        PRESETS["mini"],
        "heads",
        minutes=0.02,
        folder=tmp_path,
        count=1,
        reporter=lambda *_: lambda progress, _: steps.append(progress.tokens),
    )
    assert found.tokens == steps[-1] > 0 and found.seconds >= 1.2
    assert all(0 <= right <= total for right, total in found.shares.values()) and found.shares["name L3"][1]
    row = str(found).split("|")
    assert row[1].strip() == "heads" and len(row) == len(COLUMNS) + 5


def test_a_budget_counts_computing_and_no_waiting():
    clock, began = computing_clock(torch.device("cpu")), time.monotonic()
    before = clock()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    waited = clock() - before
    assert waited < (time.monotonic() - began) / 2
    while clock() - before < waited + 0.01:
        sum(range(1000))


def test_the_cache_changes_nothing():
    net = Net(SMALL)
    initialise(net, 0)
    prompt = ids(40)
    with torch.no_grad():
        whole = net(prompt)
        _, cache = net.hidden(prompt[:, :25])
        hidden, _ = net.hidden(prompt[:, 25:], cache)
    assert torch.allclose(whole[:, 25:], net.logits(hidden), atol=1e-4)
    out = generate(net, prompt[0].tolist(), 5, stops=())
    assert out[0] == int(whole[0, -1].argmax()) and len(out) == 5


def test_orthogonalise_levels_the_singular_values():
    matrix = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.3 and values.max() < 1.5


def test_the_optimizer_takes_up_its_state():
    def one() -> tuple[Net, Optimizer]:
        net = Net(SMALL)
        initialise(net, 0)
        return net, Optimizer(net.named_parameters())

    def step(net: Net, optimizer: Optimizer) -> None:
        net(ids(20)).logsumexp(-1).mean().backward()
        optimizer.step(1e-3)

    net, optimizer = one()
    step(net, optimizer)
    other, resumed = one()
    other.load_state_dict(net.state_dict())
    resumed.restore(optimizer.state())
    step(net, optimizer)
    step(other, resumed)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_accepted_tokens_are_counted_per_drafted_token():
    sure, never = accepted_share([1.0] * 10, Random(0)), accepted_share([0.0] * 10, Random(0))
    assert sure == (8, 8)  # two steps of four drafted tokens and one of the target's own
    assert never == (0, 4 * 7 + 3 + 2 + 1)
    assert accepted_share([1, 1, 0, 1, 1], Random(0)) == (4, 4 + 2)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "penstock.models.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    return os.environ | {"PYTHONPATH": f"{root / 'libs'}:{root / 'services'}", "OMP_NUM_THREADS": "1"}


def steps_in(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return int(json.loads(file.metadata()["progress"])["steps"])


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    train = command("train", "--preset", "tiny", "--runs", tmp_path, "--save-every", "0")
    checkpoint = tmp_path / "tiny" / "seedling" / "checkpoint.safetensors"
    process = subprocess.Popen(train, env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (checkpoint.exists() and steps_in(checkpoint) >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed_at = steps_in(checkpoint)
    done = subprocess.run(train, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    first = next(line for line in done.stderr.splitlines() if " seedling " in line)
    assert int(first.split("step ")[1].split()[0]) > killed_at
    for name in NAMES:
        net, tokenizer = load(tmp_path / "tiny" / name)
        assert tokenizer.get_vocab_size() <= net.shape.vocabulary
    figures = evaluated(tmp_path / "tiny" / "penstock-mini", "--kinds", "L1")
    wanted = {"tool_exact", "value_exact", "json_valid", "accept_tool_calls", "accept_answers", "accept_text"}
    assert wanted | {"asks_back", "declines", "kind_spread", "tool_exact_L1"} <= figures.keys()
    beside = {"tool_exact", "tool_name", "tool_exact_L1", "json_valid", "json_exact"}
    for name in beside:
        assert figures[f"{name}_constrained"]["against"] == figures[name]["against"], "the same turns"


def evaluated(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    """Figures by name; of the free column, and of that with constrained decoding by a mesh of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "models", "eval", *map(str, arguments), "--count", "1", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bench"] == "models"
    return {figure["id"]: figure for figure in report["figures"]}


def test_the_package_and_its_commands_import_nothing_heavy():
    heavy = "{'torch', 'tokenizers', 'transformers'}"
    code = f"import sys, penstock.models, penstock.models.cli; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    with pytest.raises(KeyError, match="penstock-mini-draft"):
        embedded("other")


def test_a_head_learns_what_its_target_says(tmp_path):
    """A rehearsal: the loss falls, the layout is that of published heads, and what is right is counted as a plain loop
    counts it."""
    torch.manual_seed(3)
    _, tokenizer = load(embedded(NAMES[0]))
    net = Net(NetShape(3, 64, 96, 2, 2, head=32))
    plan = replace(HEADS["tiny"], run=replace(HEADS["tiny"].run, tokens=9_000), counted=1)
    trainer, losses = HeadTrainer(plan, net, tokenizer), []
    head = trainer.run(lambda progress, _: losses.append(progress.loss))
    assert losses[-1] < losses[0]
    export_head(head, tmp_path)
    again = load_head(tmp_path)
    lesson = Lesson(net, trainer._stream.next(1.0), again.shape.layers)
    lesson.ids = lesson.ids[:1]
    found = acceptance(again, lesson, 2, 8)
    assert found == naive_acceptance(again, lesson, 2, 8) and found[0][1] > 20


def naive_acceptance(head, lesson, steps, reach):
    """One text, one row and one guess at a time."""
    counts = [[0, 0] for _ in range(steps)]
    for text, ids in enumerate(lesson.ids):
        counted = set(lesson.places[text].tolist())
        with torch.no_grad():
            best = dict(zip(lesson.places[text].tolist(), lesson.logits[text].float().argmax(-1).tolist(), strict=True))
        for row in range(len(ids) - 1):
            for step in range(steps):
                place = row + 1 + step
                if place not in counted:
                    break
                features, embedded_ = lesson.features[text : text + 1].float(), lesson.embedded[text : text + 1]
                with torch.no_grad():
                    state = head(features, embedded_, step + 1, reach, [torch.tensor([row])])[step][0]
                right = int(head.guess(state)[0]) == best[place]
                counts[step][0] += right
                counts[step][1] += 1
                if not right or int(ids[place + 1]) != best[place]:
                    break
    return [(right, seen) for right, seen in counts]

"""Hidden states out of a step: those that the layers compute, of all rows that are asked for, however work is cut."""

from __future__ import annotations

import pytest
import torch

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.models import NAMES, embedded
from penstock.models.export import load

TAPS = (1, 3, 5)
LENGTHS = (40, 17, 90, 64)


def runner(dtype: str = "float32", kernels: bool = True) -> Runner:
    directory = embedded(NAMES[0])
    made = Runner(inspect(directory), EngineConfig(directory, dtype=dtype, kv_pool_tokens=4096, kernels=kernels))
    made.tap(TAPS)
    return made


def text(length: int) -> list[int]:
    return torch.randint(300, 4000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def run_of(tokens: list[int], start: int, count: int, page: int, *, featured: bool = True, sampling=None) -> Run:
    """The rows [start, start + count) of `tokens` as a chunk of a prompt."""
    params = sampling or SamplingParams(max_tokens=1, temperature=0.0)
    choice = Choice(params, frozenset(), tokens, len(tokens))
    return Run(choice, start, count, list(range(page, page + 8)), (str(page), 0), featured=featured)


def naive(tokens: list[int]) -> torch.Tensor:
    """The same by the network that the model was trained as: [tokens, layers * hidden]."""
    net, _ = load(embedded(NAMES[0]))
    with torch.inference_mode():
        found, _ = net.features(torch.tensor([tokens]), TAPS)
    return found[0]


def features_of(model: Runner, tokens: list[int], step: int) -> tuple[torch.Tensor, list[int]]:
    """[rows, layers * hidden] of the text in chunks of so many tokens, and the positions of the rows."""
    rows, places = list[torch.Tensor](), list[int]()
    for start in range(0, len(tokens), step):
        run = run_of(tokens, start, min(step, len(tokens) - start), 1)
        model.step([run])
        begin, features = run.told(run.end)
        rows.append(features.float())
        places += range(begin, run.end)
    return torch.cat(rows), places


@pytest.mark.parametrize("kernels", [True, False])
def test_they_are_the_states_behind_the_layers(kernels):
    """Of the last tokens of each step, as a head looks at no more."""
    tokens = text(100)
    found, places = features_of(runner(kernels=kernels), tokens, 40)
    assert places == [*range(8, 40), *range(48, 80), *range(80, 100)]
    torch.testing.assert_close(found, naive(tokens)[places], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_prompt_may_be_cut_anywhere(dtype):
    """Bit by bit, with the kernels."""
    model, tokens = runner(dtype), text(100)
    all_of, _ = features_of(model, tokens, 32)
    for step in (1, 7, 16, 64, 100):
        found, places = features_of(model, tokens, step)
        assert torch.equal(found, all_of[places])


@pytest.mark.parametrize("kernels", [True, False])
def test_they_do_not_depend_on_the_batch(kernels):
    alone, together = runner(kernels=kernels), runner(kernels=kernels)
    texts = [text(length) for length in LENGTHS]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for start in range(0, 90, 5):
        live = [at for at, tokens in enumerate(texts) if start < len(tokens)]
        counts = {at: min(5, len(texts[at]) - start) for at in live}
        # every second text has features, so the others' rows lie between theirs
        runs = {at: run_of(texts[at], start, counts[at], 1 + 8 * at, featured=at % 2 == 0) for at in live}
        together.step(list(runs.values()))
        for at, run in runs.items():
            if at % 2:
                assert run.features is None
            else:
                found[at].append(run.features)
    for at in (0, 2):
        wanted, _ = features_of(alone, texts[at], 5)
        if kernels:
            assert torch.equal(torch.cat(found[at]), wanted)
        else:
            torch.testing.assert_close(torch.cat(found[at]), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", [True, False])
def test_drafts_have_them_too(kernels):
    model, tokens = runner(kernels=kernels), text(40)
    model.step([run_of(tokens, 0, 30, 1)])
    choice = Choice(SamplingParams(max_tokens=9, temperature=0.0), frozenset(), tokens[:31], 31, tuple(tokens[31:]))
    run = Run(choice, 30, 1, list(range(1, 9)), ("1", 0), featured=True)
    model.step([run])
    assert run.features is not None and len(run.features) == 10
    torch.testing.assert_close(run.features, naive(tokens)[30:], atol=2e-3, rtol=1e-3)
    begin, features = run.told(34)
    assert begin == 30 and torch.equal(features, run.features[:4]), "the others were wrong"


@pytest.mark.parametrize("sampling", [None, SamplingParams(max_tokens=1, temperature=0.8, seed=3)])
@pytest.mark.parametrize("kernels", [True, False])
def test_they_change_no_token(kernels, sampling):
    with_features, without = (runner(kernels=kernels) for _ in range(2))
    for length in LENGTHS:
        tokens = text(length)
        runs = [run_of(tokens, 0, length, 1, featured=on, sampling=sampling) for on in (True, False)]
        assert with_features.step(runs[:1]) == without.step(runs[1:])


@pytest.mark.parametrize("layers", [(0, 1), (1, 6), (3, 1), (2, 2)])
def test_layers_that_have_none_are_refused(layers):
    with pytest.raises(ValueError, match="growing numbers from 1 to 5"):
        runner().tap(layers)

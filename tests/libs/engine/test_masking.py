"""The C++ way to the most probable legal token, against masked logits; and masks that fail."""

from __future__ import annotations

import random
import threading
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.checkpoint import inspect
from penstock.engine.bans import WordBans
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError, GrammarFailed, NotFinite
from penstock.engine.forward.runner import Runner, _choices
from penstock.engine.grammars import tokenizer_of
from penstock.engine.kernels.cpu.legality import Legality
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.grammar.guide import Endings, Guide
from penstock.grammar.masks import MaskMaker
from penstock.grammar.matcher import Matcher
from penstock.grammar.vocabulary import Vocabulary
from penstock.models import embedded
from penstock.testing import schemas
from penstock.testing.checkpoints import TinyModel, write_checkpoint


def runner(directory) -> Runner:
    return Runner(inspect(directory), EngineConfig(model=directory, kv_pool_tokens=4096, threads=1))


def run_of(number: int, length: int, drafts: int = 0, guide: Guide | None = None) -> Run:
    """A whole prompt of random tokens, and drafts behind it: 1 + drafts samples."""
    source = random.Random(number)
    tokens = [source.randrange(250) for _ in range(length)]
    params = SamplingParams(max_tokens=99, temperature=0.0)
    choice = Choice(params, frozenset(), tokens, length, tuple(source.randrange(250) for _ in range(drafts)))
    choice.guide = guide
    pages = list(range(1 + 10 * number, 11 + 10 * number))
    return Run(choice, 0, length, pages, (str(number), 0))


@pytest.mark.parametrize("vocab_size", [320, 333])
@pytest.mark.parametrize("density", [0.005, 0.5, 1.0])
def test_the_most_probable_legal_token_is_that_of_the_masked_logits(tmp_path, vocab_size, density):
    """The bits may be written while the step is computed; those behind the vocabulary mean nothing."""
    model = runner(write_checkpoint(tmp_path / "model", TinyModel(vocab_size=vocab_size)))
    assert model._compiled is not None
    runs = [run_of(0, 40), run_of(1, 5, drafts=2), run_of(2, 33)]
    row = [3, 0, 1, 2, -1]
    source = np.random.default_rng(vocab_size)
    for _ in range(5):
        legal = source.random((4, 352)) < density
        legal[:, 7] = True
        bits, ready = np.zeros((4, 11), dtype=np.int32), array("i", [0])

        def write(bits=bits, legal=legal, ready=ready):
            bits[:] = np.packbits(legal, axis=1, bitorder="little").view(np.int32)
            ready[0] = 1

        with torch.inference_mode():
            logits = model.logits(runs).numpy()
            late = threading.Timer(0.01, write)
            late.start()
            found = model._compiled.best(runs, Legality(bits, row, ready))
            late.join()
        allowed = [legal[at, :vocab_size] if at >= 0 else np.ones(vocab_size, dtype=bool) for at in row]
        assert found == np.where(allowed, logits, -np.inf).argmax(-1).tolist()


def test_it_is_told_when_no_legal_token_has_a_finite_logit(tmp_path):
    model = runner(write_checkpoint(tmp_path / "model"))
    assert model._compiled is not None
    nothing = Legality(np.zeros((1, 10), dtype=np.int32), [0], array("i", [1]))
    with torch.inference_mode(), pytest.raises(NotFinite):
        model._compiled.best([run_of(0, 5)], nothing)


def with_ban(run: Run, banned: set[int]) -> Run:
    run.choice.params = replace(run.choice.params, banned_token_ids=frozenset(banned))
    return run


@pytest.mark.parametrize("vocab_size", [320, 333])
def test_bans_keep_the_quick_way_and_are_those_of_the_masked_logits(tmp_path, vocab_size, monkeypatch):
    """Of runs with different bans, with drafts, and without any ban in one step; what torch would choose."""
    model = runner(write_checkpoint(tmp_path / "model", TinyModel(vocab_size=vocab_size)))
    plain = [run_of(0, 40), run_of(1, 5, drafts=2), run_of(2, 33), run_of(3, 9)]
    with torch.inference_mode():
        logits = model.logits(plain)
    best = logits.argsort(-1, descending=True)
    bans: list[set[int]] = [set(best[0, :3].tolist()), set(best[1:4, 0].tolist()), set(), {vocab_size - 1, 0}]
    runs = [with_ban(run, banned) for run, banned in zip(plain, bans, strict=True)]
    assert all(run.choice.plain for run in runs)
    expected = logits.clone()
    for row, banned in zip((0, 1, 2, 3, 5), (bans[0], bans[1], bans[1], bans[1], bans[3]), strict=True):
        expected[row, list(banned)] = -torch.inf
    tokens = expected.argmax(-1).tolist()
    assert [model.step([run])[0][0].token for run in runs] == [tokens[at] for at in (0, 1, 4, 5)]
    quick = model.step(runs)
    rows = [choice for run in runs for choice in _choices(run)]
    assert [chosen.token for chosen in model.sampler.sample(logits, rows)] == tokens
    monkeypatch.setattr(model, "logits", lambda order: pytest.fail("the way of logits was taken"))
    assert model.step(runs) == quick


def test_a_bad_word_costs_the_quick_way_nothing(tmp_path, monkeypatch):
    """Neither where it has begun, with drafts and without, nor where it has not. Each token is a letter of its own."""
    model = runner(write_checkpoint(tmp_path / "model"))
    runs = [run_of(0, 40), run_of(1, 5, drafts=2), run_of(2, 33)]
    with torch.inference_mode():
        logits = model.logits(runs)
    best = logits.argsort(-1, descending=True).tolist()
    drafts = runs[1].choice.drafts
    letters = [chr(0x4E00 + token) for token in range(320)]
    said = ((*runs[0].choice.tokens[-2:], best[0][0]), (drafts[0], best[2][0]), (*drafts, best[3][0]))
    words = tuple("".join(letters[token] for token in tokens) for tokens in said)
    bans = WordBans(words, frozenset(), Vocabulary([letter.encode() for letter in letters]))
    for run, output in zip(runs, (3, 0, 9), strict=True):
        run.choice.prompt_length -= output
        run.choice.words = bans
    rows = [best[0][1], best[1][0], best[2][1], best[3][1], best[4][0]]
    choices = [Choice(one.params, one.stops, one.tokens, one.prompt_length, one.drafts[:count], words=bans)
               for run in runs for one in [run.choice] for count in range(run.samples)]  # fmt: skip
    assert [chosen.token for chosen in model.sampler.sample(logits, choices)] == rows
    alone = [model.step([run])[0][0].token for run in runs]
    assert alone == [rows[0], rows[1], rows[4]]
    monkeypatch.setattr(model, "logits", lambda order: pytest.fail("the way of logits was taken"))
    assert [chosen[0].token for chosen in model.step(runs)] == alone
    runs[0].choice.prompt_length = 40
    assert model.step(runs)[0][0].token == best[0][0], "what the prompt ends with is no beginning"
    assert model._masking.begin([runs[2]]) is None, "nothing has begun, so nothing is masked"


@pytest.fixture(scope="module")
def mini() -> Runner:
    return runner(embedded("penstock-mini"))


@pytest.fixture(scope="module")
def guide_of():
    tokenizer = tokenizer_of(inspect(embedded("penstock-mini")))
    start = Matcher.of(tokenizer, schemas.grammar(schemas.HAND_WRITTEN[11]))
    return lambda run_length: Guide(tokenizer, start, Endings(tokenizer.eos), run_length)


def test_a_defect_of_the_masks_fails_guided_runs_and_no_others(mini, guide_of, monkeypatch):
    """Also one that is no Exception, as a panic of llguidance's is none. Nothing waits for ever."""

    class Panic(BaseException):
        pass

    def fill(self, made):
        raise Panic("lost")

    [alone] = mini.step([run_of(3, 9)])
    with monkeypatch.context() as broken:
        broken.setattr(MaskMaker, "fill", fill)
        failed, plain = mini.step([run_of(2, 20, guide=guide_of(20)), run_of(3, 9)])
    assert isinstance(failed, EngineError) and "lost" in str(failed)
    assert plain == alone
    [again] = mini.step([run_of(2, 20, guide=guide_of(20))])
    assert isinstance(again, list)


def test_a_run_that_left_its_grammar_fails_alone(mini, guide_of):
    [alone] = mini.step([run_of(3, 9)])
    failed, plain = mini.step([run_of(2, 20, guide=guide_of(15)), run_of(3, 9)])
    assert isinstance(failed, GrammarFailed) and plain == alone


def test_a_step_that_is_repeated_gives_the_same(mini, guide_of):
    """The engine repeats steps that fail, in halves: a guide takes each token once."""
    guide = guide_of(20)
    guide.leads = False
    first, second = (mini.step([run_of(2, 20, guide=guide)]) for _ in range(2))
    assert first == second and isinstance(first[0], list)


def test_the_thread_of_masks_ends_with_its_runner(guide_of):
    own = runner(embedded("penstock-mini"))
    own.step([run_of(2, 20, guide=guide_of(20))])
    [thread] = [one for one in threading.enumerate() if one.name == "masks" and one.is_alive()][-1:]
    del own
    thread.join(10)
    assert not thread.is_alive()

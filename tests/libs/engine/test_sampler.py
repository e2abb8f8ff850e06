"""The fast sampler says what the plain one says, and its noise is what it claims to be."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.bans import WordBans
from penstock.engine.errors import NotFinite
from penstock.engine.kernels.cpu.build import library
from penstock.engine.kernels.cpu.draws import NativeDraws
from penstock.engine.request import SamplingParams
from penstock.engine.sampling import noise, reference
from penstock.engine.sampling.choice import Choice, SamplerState
from penstock.engine.sampling.sampler import Sampler
from penstock.grammar.vocabulary import Vocabulary

VOCAB = 24
TEXTS = [*(text.encode() for text in ("a", "b", "ab", " a", "c", " ", "bc", "(c)")), *[b""] * 16]
VOCABULARY = Vocabulary(TEXTS)
CPU = torch.device("cpu")
SAMPLER = Sampler(VOCAB, CPU)
NATIVE = NativeDraws(library())
BOTH = pytest.mark.parametrize("draws", [None, NATIVE], ids=["torch", "compiled"])
"""What draws."""


def choice_of(params, prompt, output, stops=frozenset(), drafts=0, state=None, legal=None, vocab=VOCAB):
    """The last `drafts` tokens of the output as drafts; of a guided text where `legal` is given."""
    known = len(output) - drafts
    tokens = [*prompt, *output[:known]]
    guided = {} if legal is None else {"guide": object(), "legal": words_of(legal, params, output, stops, vocab)}
    if params.bad_words:
        guided["words"] = WordBans(params.bad_words, params.banned_token_ids, VOCABULARY)
    return Choice(params, stops, tokens, len(prompt), tuple(output[known:]), state or SamplerState(), **guided)


def words_of(legal, params, output, stops, vocab):
    """As guides have it: bans of ends are settled, unless nothing else is legal."""
    if len(output) < params.min_tokens and legal - stops:
        legal = legal - stops
    flags = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    flags[list(legal)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
# Penalties and biases that make no two different logits equal: float32 would decide such a tie by rounding.
sampling = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 10, VOCAB, 100]),
    top_p=st.sampled_from([0.05, 0.37, 0.61, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.21]),
    repetition_penalty=st.sampled_from([1.0, 0.8121, 1.3957]),
    presence_penalty=st.sampled_from([0.0, 0.6513, -0.4127]),
    frequency_penalty=st.sampled_from([0.0, 0.3519, -0.2231]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.3077, 2.6173]), max_size=3),
    banned_token_ids=st.frozensets(st.integers(0, VOCAB - 2), max_size=3),
    bad_words=st.lists(st.sampled_from(["ab", "a b", "abc", "c", "a a", "b"]), max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**64),
)
ids = st.integers(0, VOCAB - 1)
legal_ids = st.none() | st.frozensets(ids, min_size=1, max_size=5) | st.frozensets(ids, min_size=VOCAB // 2)
repeating = tokens | st.lists(st.integers(0, 3), max_size=12)
rows = st.tuples(sampling, tokens.filter(bool), repeating, st.frozensets(ids, max_size=3), legal_ids)


def acceptable(logits, params, prompt, output, stops, legal=None):
    """What the reference says, also with cuts moved by less than float32 can tell."""
    found = set()
    for nudge in (-1e-5, 0.0, 1e-5):
        near = {name: getattr(params, name) for name in params.__dataclass_fields__ if name not in ("top_p", "min_p")}
        top_p = params.top_p if params.top_p == 1.0 else params.top_p + nudge
        min_p = params.min_p if params.min_p == 0.0 else params.min_p + nudge
        changed = SamplingParams(**near, top_p=top_p, min_p=min_p)
        found.add(reference.sample(logits, changed, prompt, output, stops, legal=legal, texts=TEXTS))
    return found


@BOTH
@settings(max_examples=200)
@given(batch=st.lists(rows, min_size=1, max_size=5), seed=st.integers(0, 10**6), drafts=st.integers(0, 4))
def test_equals_the_plain_sampler(draws, batch, seed, drafts):
    """Seeds below 1,000 give logits with many ties."""
    rows = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    rows = rows.round() if seed < 1000 else rows
    before = rows.clone()
    choices = [
        choice_of(params, prompt, output, stops, min(drafts, len(output)), legal=legal)
        for params, prompt, output, stops, legal in batch
    ]
    chosen = Sampler(VOCAB, CPU, draws).sample(rows, choices)
    assert torch.equal(rows, before)
    for row, (params, prompt, output, stops, legal), found in zip(rows.tolist(), batch, chosen, strict=True):
        assert found.token in acceptable(row, params, prompt, output, stops, legal)
        assert legal is None or found.token in legal


GREEDY = {"max_tokens": 9, "temperature": 0.0}


@pytest.mark.parametrize(
    ("plain", "fields", "more"),
    [
        (True, {}, {}),
        (True, {"min_tokens": 3}, {}),
        (True, {"min_tokens": 3}, {"guide": object(), "stops": frozenset({1})}),
        (True, {"banned_token_ids": frozenset({1})}, {}),
        (True, {}, {"guide": object()}),
        (False, {"min_tokens": 3}, {"stops": frozenset({1})}),
        (False, {"banned_token_ids": frozenset({1})}, {"guide": object()}),
        (False, {"logprobs": 0}, {}),
        (False, {"logit_bias": {1: 1.0}}, {}),
        (False, {"presence_penalty": 0.1}, {}),
        (False, {"temperature": 0.1}, {}),
    ],
)
def test_an_argmax_is_enough_where_nothing_else_is_asked_for(plain, fields, more):
    choice = Choice(
        SamplingParams(**{**GREEDY, **fields}), **{"stops": frozenset(), **more}, tokens=[1], prompt_length=1
    )
    assert choice.plain is plain


def test_a_vocabulary_may_be_larger_than_what_gets_noise_at_once():
    vocab = (1 << 17) + 3
    rows = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)) * 3
    choices = [choice_of(SamplingParams(9, temperature=1.0, seed=seed), [1], [], vocab=vocab) for seed in (1, 2)]
    places = torch.tensor([[noise.stream(seed, 1)] for seed in (1, 2)]) + noise.steps(vocab, CPU)
    expected = (rows + noise.gumbel(places)).argmax(-1).tolist()
    assert [one.token for one in Sampler(vocab, CPU).sample(rows, choices)] == expected


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_a_row_is_cut_beside_one_that_is_not(fields):
    rows = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)).repeat(20, 1)
    params = [SamplingParams(9, temperature=5.0, seed=seed, **(fields if seed % 2 else {})) for seed in range(40)]
    chosen = SAMPLER.sample(rows, [choice_of(one, [1], []) for one in params])
    best = rows.argmax(-1).tolist()
    assert [one.token for one in chosen[1::2]] == best[1::2]
    assert len({one.token for one in chosen[::2]}) > 5


def test_a_sum_of_all_probabilities_may_be_less_than_one():
    """By what float32 rounds: then all tokens make up top_p, and not too few."""
    rows = torch.randn(64, 2000, generator=torch.Generator().manual_seed(1))
    almost = float(np.nextafter(np.float32(1), np.float32(0)))
    assert (rows.softmax(-1).sort(-1, descending=True).values.cumsum(-1)[:, -1] < almost).any()
    choices = [choice_of(SamplingParams(9, top_p=almost, seed=seed), [1], [], vocab=2000) for seed in range(64)]
    free = [choice_of(SamplingParams(9, seed=seed), [1], [], vocab=2000) for seed in range(64)]
    sampler = Sampler(2000, CPU)
    assert sampler.sample(rows, choices) == sampler.sample(rows, free)


def test_counts_follow_a_growing_sequence():
    params = SamplingParams(50, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    state = SamplerState()
    known = [3, 4, 5]
    for _ in range(40):
        plain = reference.sample(logits[0].tolist(), params, [3, 4, 5], known[3:])
        for drafts in (0, min(2, len(known) - 3)):
            again = choice_of(params, [3, 4, 5], known[3:], drafts=drafts)
            assert SAMPLER.sample(logits, [again])[0].token == plain
        assert SAMPLER.sample(logits, [choice_of(params, [3, 4, 5], known[3:], state=state)])[0].token == plain
        known.append(plain)


def test_logprobs_of_a_guided_text_are_the_models_own():
    """Of tokens that its grammar forbids too."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    expected = logits[0].log_softmax(-1)
    worst = int(expected.argmin())
    for params in (SamplingParams(9, temperature=0.0, logprobs=4), SamplingParams(9, temperature=1.0, logprobs=4)):
        chosen = SAMPLER.sample(logits, [choice_of(params, [1], [], legal=frozenset({worst}))])[0]
        assert chosen.token == worst and chosen.logprob == pytest.approx(float(expected[worst]), abs=1e-6)
        assert chosen.top[0][0] == int(expected.argmax())


def test_lowest_id_wins_ties():
    flat = torch.zeros(2, VOCAB)
    flat[1, [7, 11]] = 1.0
    greedy = SamplingParams(1, temperature=0.0)
    assert [one.token for one in SAMPLER.sample(flat, [choice_of(greedy, [1], [])] * 2)] == [0, 7]


def test_logprobs_are_the_models_own():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = logits[0].log_softmax(-1)
    params = SamplingParams(9, temperature=0.3, top_k=2, logit_bias={5: 100.0}, presence_penalty=2.0, logprobs=4)
    chosen = SAMPLER.sample(logits, [choice_of(params, [1], [5])])[0]
    assert chosen.token == 5 and chosen.logprob == pytest.approx(float(expected[5]), abs=1e-6)
    best = sorted(range(VOCAB), key=lambda token: -expected[token])[:4]
    assert [token for token, _ in chosen.top] == best
    assert SAMPLER.sample(logits, [choice_of(SamplingParams(9, logprobs=0), [1], [])])[0].top == ()
    assert SAMPLER.sample(logits, [choice_of(SamplingParams(9), [1], [])])[0].logprob is None
    everything = SAMPLER.sample(logits, [choice_of(SamplingParams(9, logprobs=500), [1], [])])[0]
    assert len(everything.top) == VOCAB


def test_logprobs_of_one_row_do_not_depend_on_what_others_want():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    wanted = [2, None, 7, 0, 500]
    choices = [choice_of(SamplingParams(9, temperature=0.8, logprobs=count), [1], []) for count in wanted]
    together = SAMPLER.sample(logits, choices)
    alone = [SAMPLER.sample(logits[at : at + 1], choices[at : at + 1])[0] for at in range(5)]
    assert together == alone
    assert [len(one.top) for one in together] == [2, 0, 7, 0, VOCAB]
    assert together[1].logprob is None and together[3].logprob is not None


@BOTH
def test_a_row_does_not_depend_on_its_batch(draws):
    sampler = Sampler(VOCAB, CPU, draws)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, VOCAB, generator=generator)
    choices = [
        choice_of(SamplingParams(9, seed=at, temperature=0.9, top_k=at % 7, top_p=1 - at / 80), [1], [2] * at)
        for at in range(40)
    ]
    together = [one.token for one in sampler.sample(logits, choices)]
    alone = [sampler.sample(logits[at : at + 1], [choices[at]])[0].token for at in range(40)]
    assert together == alone


@BOTH
def test_a_flat_distribution_needs_a_wider_nucleus(draws):
    """Beyond the tokens looked at first; and rows of both kinds in one batch."""
    sampler = Sampler(1000, CPU, draws)
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(6)) * torch.tensor([[0.1], [9.0], [0.1]])
    for top_p in (0.2, 0.5, 0.9, 0.999):
        params = [SamplingParams(9, seed=at, top_p=top_p, top_k=400 * (at == 2)) for at in range(3)]
        found = sampler.sample(logits, [choice_of(one, [1], []) for one in params])
        for row, one, chosen in zip(logits.tolist(), params, found, strict=True):
            assert chosen.token in acceptable(row, one, [1], [], frozenset())


@pytest.mark.parametrize("vocab", [1, 17, 4096, 5003])
@pytest.mark.parametrize("spread", [0.0, 1.0, 40.0])
def test_the_compiled_draws_are_those_of_torch(vocab, spread):
    """Of many places, with every cut and without; also of equal logits, where the noise alone decides."""
    rows = 240
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits[::5, ::3] = -math.inf
    logits[:, -1] = 0.0
    params = [
        SamplingParams(
            9,
            seed=at,
            temperature=(0.2, 1.0, 3.0, 0.0)[at % 4],
            banned_token_ids=frozenset() if at % 2 or vocab < 9 else frozenset({0, vocab // 2, vocab - 2}),
            top_k=(0, 0, 7, 1000)[at % 4],
            top_p=(1.0, 0.9, 1.0, 0.3, 1.0)[at % 5],
            min_p=(0.0, 0.0, 0.05)[at // 2 % 3],
        )
        for at in range(rows)
    ]
    allowed = (None, None, None, frozenset(range(0, vocab, 2)) | {vocab - 1}, frozenset({vocab - 1}))
    choices = [choice_of(one, [1], [], legal=allowed[at % 5], vocab=vocab) for at, one in enumerate(params)]
    one, other = (Sampler(vocab, CPU, draws).sample(logits, choices) for draws in (NATIVE, None))
    assert one == other


@BOTH
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"frequency_penalty": 1.0}, {"temperature": 0.0}], ids=str)
def test_logits_that_are_not_finite_are_refused(draws, wrong, fields):
    logits = torch.zeros(2, VOCAB)
    logits[1, :] = wrong
    if wrong > -math.inf or math.isnan(wrong):
        logits[1, 1:] = 0.0
    with pytest.raises(NotFinite):
        Sampler(VOCAB, CPU, draws).sample(logits, [choice_of(SamplingParams(9, **fields), [1], [])] * 2)


# Noise


def test_noise_is_the_published_one():
    """Golden values: a change here changes what every stored seed means."""
    streams = torch.tensor([noise.stream(seed, position) for seed, position in [(0, 0), (1, 7), (2**64 - 1, 10**6)]])
    found = noise.gumbel(streams.unsqueeze(1) + noise.steps(3, CPU))
    plain = [[reference.gumbel(seed, at, token) for token in range(3)] for seed, at in [(0, 0), (1, 7), (-1, 10**6)]]
    torch.testing.assert_close(found, torch.tensor(plain, dtype=torch.float32), rtol=1e-6, atol=1e-6)
    assert noise.stream(0, 0) == -6411193824288604561
    assert noise.stream(42, 17) == noise.stream(42 + 2**64, 17) == 8248495297299237157
    assert noise.mix(1) == 6238072747940578789


def test_noise_is_the_same_in_another_process():
    script = (
        "import torch; from penstock.engine.sampling import noise;"
        "print(noise.gumbel(torch.tensor([[noise.stream(5, 9)]]) + noise.steps(50, torch.device('cpu'))).tolist())"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "123"}
    printed = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    here = noise.gumbel(torch.tensor([[noise.stream(5, 9)]]) + noise.steps(50, CPU)).tolist()
    assert printed.stdout.decode().strip() == str(here)


def test_noise_looks_like_gumbel():
    """Mean and variance over a million draws, and no correlation of neighbours in seed, position or token."""
    streams = torch.tensor([noise.stream(seed, position) for seed in range(30) for position in range(30)])
    draws = noise.gumbel(streams.unsqueeze(1) + noise.steps(1200, CPU)).double()
    assert float(draws.mean()) == pytest.approx(0.5772157, abs=0.005)
    assert float(draws.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)
    assert bool(draws.isfinite().all())
    cube = draws.view(30, 30, 1200)
    for one, other in [(cube[1:], cube[:-1]), (cube[:, 1:], cube[:, :-1]), (cube[..., 1:], cube[..., :-1])]:
        pairs = torch.stack((one.flatten(), other.flatten()))
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.005


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_samples_follow_the_softmax(vary):
    """Chi-square over 20,000 draws of 24 tokens; the bound is far beyond the 99.99th percentile."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    expected = (logits / 0.8).softmax(-1).tolist()
    count = 20_000
    streams = [noise.stream(*((at, 5) if vary == "seed" else (5, at))) for at in range(count)]
    noisy = logits / 0.8 + noise.gumbel(torch.tensor(streams).unsqueeze(1) + noise.steps(VOCAB, CPU))
    seen = Counter(noisy.argmax(-1).tolist())
    score = sum((seen[token] - count * share) ** 2 / (count * share) for token, share in enumerate(expected))
    assert score < 65

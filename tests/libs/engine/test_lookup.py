"""Guesses from texts: the same in C++ and numpy as by the book, and never from another tenant's."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kernels.cpu.build import NotBuilt, library
from penstock.engine.speculation.guess import NOTHING, Guess
from penstock.engine.speculation.looking import Looked, Looking
from penstock.engine.speculation.lookup import native
from penstock.engine.speculation.lookup.chances import BREAK, LEAST, MATCHED, ONE, ORDERS, PLACES, chance, table
from penstock.engine.speculation.lookup.corpus import Corpora
from penstock.engine.speculation.lookup.lookup import Lookup, LookupLimits
from penstock.engine.speculation.lookup.native import NativeCorpora
from penstock.engine.speculation.lookup.plain import PlainCorpora

LIMIT = 512
ANN, BEA = b"a" * 16, b"b" * 16


@pytest.fixture(params=["native", "plain"])
def corpora(request) -> Corpora:
    return NativeCorpora(library()) if request.param == "native" else PlainCorpora()


class Naive:
    """What a guess is, word for word."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens: list[int] = []

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens = [*self.tokens, *tokens][-self.limit :]

    def last_text(self) -> list[int]:
        text: list[int] = []
        for token in self.tokens:
            text = [] if token == BREAK else [*text, token]
        return text

    def places(self, gram: list[int]) -> list[int]:
        """The latest ones of tokens that stand behind the gram."""
        count, all = len(gram), self.tokens
        found = [at for at in range(count, len(all)) if all[at - count : at] == gram and all[at] != BREAK]
        return found[::-1][:PLACES]

    def follow(self, order: int, places: list[int], most: int) -> tuple[list[int], list[int], int]:
        tokens, chances, whole, worth = [], [], ONE, 0
        for depth in range(most):
            votes: dict[int, list[int]] = {}
            for place in places:
                if place + depth < len(self.tokens) and self.tokens[place + depth] != BREAK:
                    votes.setdefault(self.tokens[place + depth], []).append(place)
            if not votes:
                break
            token = max(votes, key=lambda each: (len(votes[each]), max(votes[each])))
            size = sum(map(len, votes.values()))
            part = round(chance(min(order + depth, MATCHED), size, len(votes[token])) * ONE)
            whole = whole * part >> 16
            if whole < LEAST:
                break
            places, worth = votes[token], worth + whole
            tokens.append(token)
            chances.append(part)
        return tokens, chances, worth


def naive_guess(own: Naive, others: Sequence[Naive | None], after: Sequence[int], most: int) -> Guess:
    context, best = [*own.last_text(), *after], ([], [], 0)
    for corpus in (own, *others):
        for order in reversed(ORDERS):
            if corpus is not None and order <= len(context):
                path = corpus.follow(order, corpus.places(context[-order:]), most)
                best = max(best, path, key=lambda each: each[2])
    return Guess(tuple(best[0]), tuple(part / ONE for part in best[1]))


words = st.lists(st.integers(0, 3), max_size=40)
texts = st.lists(words, max_size=30)


@given(texts, texts, texts, st.lists(st.integers(0, 3), max_size=20), st.integers(0, 40))
@settings(deadline=None)
def test_the_guess_is_that_of_the_definition(own, second, third, after, most):
    naive = [Naive(LIMIT) for _ in range(3)]
    for corpus, parts in zip(naive, (own, second, third), strict=True):
        for part in parts:
            corpus.append([BREAK, *part])
    wanted = naive_guess(naive[0], (naive[1], naive[2]), after, most)
    for corpora in (NativeCorpora(library()), PlainCorpora()):
        bodies = [corpora.new(LIMIT) for _ in range(3)]
        for body, parts in zip(bodies, (own, second, third), strict=True):
            for part in parts:
                body.append(array("i", [BREAK, *part]))
        assert corpora.guess(bodies[0], (bodies[1], bodies[2]), after, most) == wanted


def test_long_texts_that_grow_and_lose_their_beginning():
    """Beyond the first buckets and the first memory, and around the ring several times."""
    source = random.Random(7)
    phrases = [[source.randrange(5000) for _ in range(source.randrange(2, 30))] for _ in range(400)]
    limit = 1 << 14
    fast, plain = NativeCorpora(library()), PlainCorpora()
    bodies = fast.new(limit), plain.new(limit)
    guessed = 0
    for _ in range(150):
        text = [token for _ in range(20) for token in source.choice(phrases)]
        own = fast.new(LIMIT), plain.new(LIMIT)
        cut = source.randrange(200, 220)
        for corpus in (*bodies, *own):
            corpus.append(array("i", [BREAK, *text[:cut]]))
        wanted = plain.guess(own[1], (bodies[1], None), text[-3:], 32)
        assert fast.guess(own[0], (bodies[0], None), text[-3:], 32) == wanted
        guessed += len(wanted.tokens)
    assert guessed > 150


def test_a_long_quotation_is_guessed_at_length(corpora):
    """Longer than any match that the chances tell apart."""
    text = [*range(100, 200), *range(100, 120)]
    naive, corpus = Naive(LIMIT), corpora.new(LIMIT)
    for each in (naive, corpus):
        each.append(array("i", text))
    wanted = naive_guess(naive, (None, None), (), 50)
    assert MATCHED - 16 < len(wanted.tokens) <= 50 and corpora.guess(corpus, (None, None), (), 50) == wanted


def test_what_was_written_over_has_no_vote(corpora):
    """Not even where the same token stands there again."""
    text = [token for turn in range(9) for token in (1, 2 + (turn == 7), *range(128 * turn + 10, 128 * turn + 136))]
    text.append(1)
    naive, corpus = Naive(LIMIT), corpora.new(LIMIT)
    for each in (naive, corpus):
        each.append(array("i", text))
    wanted = naive_guess(naive, (None, None), (), 3)
    assert wanted.chances[0] == pytest.approx(chance(1, 3, 2), abs=1e-4)
    assert corpora.guess(corpus, (None, None), (), 3) == wanted


def test_a_chance_grows_with_all_that_speaks_for_it():
    sizes = range(1, PLACES + 1)
    for matched in range(1, MATCHED):
        for places in sizes:
            assert all(chance(matched, places, v) < chance(matched, places, v + 1) for v in range(1, places))
            assert chance(matched, places, places) < chance(matched + 1, places, places) < 1
    assert all(chance(3, places, places) < chance(3, places + 1, places + 1) for places in sizes)
    assert len(table()) == (MATCHED + 1) * (PLACES + 1) ** 2 and 0 <= min(table()) <= max(table()) < ONE


def test_what_was_repeated_most_is_proposed_and_of_equals_the_latest(corpora):
    own = corpora.new(LIMIT)
    own.append(array("i", [10, 1, 4, 11, 1, 4, 12, 1, 3, 13, 1]))
    assert corpora.guess(own, (None, None), (), 1).tokens == (4,)
    own.append(array("i", [3, 14, 1]))
    assert corpora.guess(own, (None, None), (), 1).tokens == (3,), "two of each, and this is the latest"
    assert corpora.guess(own, (None, None), (3,), 2).tokens == (14, 1), "behind a forced token"


def test_where_there_is_no_compiler_numpy_does_it(monkeypatch):
    def none() -> None:
        raise NotBuilt("no compiler")

    assert isinstance(native.corpora(), NativeCorpora)
    monkeypatch.setattr(native, "library", none)
    assert isinstance(native.corpora(), PlainCorpora)


LIMITS = LookupLimits(tokens=1 << 14, session_tokens=1 << 12, tenant_tokens=1 << 11, sessions=8, tenants=3)
POEM = tuple(range(100, 160))


def run(lookup: Lookup, prompt: Sequence[int], output: Sequence[int], tenant: bytes, session: bytes) -> None:
    """A whole sequence."""
    lookup.begin(0, (*prompt, *output[:3]), len(prompt), tenant, session)
    for token in output[3:]:
        lookup.extend(0, [token])
    lookup.end(0)


@contextmanager
def running(lookup: Lookup, tokens: Sequence[int], tenant: bytes, session: bytes) -> Iterator[None]:
    lookup.begin(1, tokens, len(tokens), tenant, session)
    yield
    lookup.end(1)


def test_a_sequence_quotes_its_prompt_and_itself(corpora):
    lookup = Lookup(LIMITS, corpora)
    lookup.begin(5, (*POEM, 7), len(POEM) + 1, b"", b"")
    assert lookup.propose(5, 4) == NOTHING
    lookup.extend(5, POEM[10:20])
    assert lookup.propose(5, 4).tokens == POEM[20:24]
    lookup.extend(5, [900, 901, 902, 903, 904, 900, 901, 902])
    assert lookup.propose(5, 2).tokens == (903, 904)
    assert lookup.propose(5, 2, after=POEM[:2]).tokens == POEM[2:4]


def test_a_sequence_that_comes_with_output_goes_on_as_if_it_were_its_own(corpora):
    whole, moved = Lookup(LIMITS, corpora), Lookup(LIMITS, corpora)
    prompt, output = (*POEM, 7), (900, 901, 902, 903, *POEM[10:30], 900, 901)
    whole.begin(1, prompt, len(prompt), b"", b"")
    whole.extend(1, output)
    moved.begin(1, (*prompt, *output), len(prompt), b"", b"")
    assert whole.propose(1, 8) == moved.propose(1, 8) != NOTHING


def test_outputs_are_remembered_for_the_session_and_the_tenant_and_prompts_for_the_session(corpora):
    lookup, secret = Lookup(LIMITS, corpora), tuple(range(300, 340))
    run(lookup, secret, POEM, ANN, b"one")
    for session, knows in ((b"one", True), (b"two", False), (b"", False)):
        with running(lookup, POEM[:8], ANN, session):
            assert lookup.propose(1, 4).tokens == POEM[8:12]
        with running(lookup, secret[:8], ANN, session):
            assert (lookup.propose(1, 4).tokens == secret[8:12]) is knows


def test_an_output_is_remembered_though_nothing_was_looked_up_for_it(corpora):
    """A short one ends before that pays."""
    lookup, prompt = Lookup(LIMITS, corpora), (7, 8)
    request = SimpleNamespace(prompt=prompt, owner=ANN, session=b"one")
    live = SimpleNamespace(ticket=3, tokens=[*prompt, *POEM], length=len(prompt) + len(POEM), request=request)
    Looking(lookup).forget(live, Looked())
    with running(lookup, POEM[:8], ANN, b"two"):
        assert lookup.propose(1, 4).tokens == POEM[8:12]


@pytest.mark.parametrize("verified", [True, False])
def test_looks_go_on_where_drafts_are_verified_whoever_made_them_and_get_rare_where_none_are(corpora, verified):
    looking, looks = Looking(Lookup(LIMITS, corpora)), 0
    request = SimpleNamespace(prompt=POEM, owner=ANN, session=b"one")
    looked = looking.begin()
    for step in range(200):
        tokens = [*POEM, *(POEM[at % len(POEM)] for at in range(step))]
        live = SimpleNamespace(ticket=3, tokens=tokens, length=len(tokens), request=request)
        looking.step()
        looking.look_back(live, looked)
        if looking.due(looked, 1e-3):
            looking.look(live, looked, (), 4)
        looks += looked.fresh
        looking.settle(looked, verified)
    assert looks == 200 if verified else looks < 100
    assert (looking.begin().brought > 0.5) == verified, "a new sequence begins as this one was"


def test_rare_looks_are_in_the_same_steps_for_all_sequences(corpora):
    looking = Looking(Lookup(LIMITS, corpora))
    request = SimpleNamespace(prompt=POEM, owner=ANN, session=b"one")
    live = SimpleNamespace(ticket=3, tokens=POEM, length=len(POEM), request=request)
    looking.look(live, looking.begin(), (), 4)
    rare, often = (replace(looking.begin(), brought=brought) for brought in (0.0, 1e9))
    due = []
    for _ in range(64):
        looking.step()
        assert looking.due(often, 1e-3)
        due.append(looking.due(rare, 1e-3))
        assert looking.due(replace(rare, told=7), 1e-3) is due[-1]
    assert sum(due) == 8


@pytest.mark.parametrize("tenant", [BEA, b""])
def test_another_tenant_knows_nothing_of_it_even_under_the_same_session(corpora, tenant):
    lookup = Lookup(LIMITS, corpora)
    run(lookup, POEM, POEM, ANN, b"one")
    with running(lookup, POEM[:20], tenant, b"one"):
        assert lookup.propose(1, 8) == NOTHING


def test_who_has_no_tenant_teaches_nobody(corpora):
    lookup = Lookup(LIMITS, corpora)
    run(lookup, POEM, POEM, b"", b"one")
    for tenant in (b"", ANN):
        with running(lookup, POEM[:20], tenant, b"one"):
            assert lookup.propose(1, 8) == NOTHING
    assert lookup.held < 100


class Told:
    """A lookup, of which one tenant's part is compared with a lookup that knows of no other."""

    def __init__(self) -> None:
        self.guesses: list[Guess] = []
        self.lookup = Lookup(LIMITS, NativeCorpora(library()))

    def play(self, acts, tenants) -> list[Guess]:
        for number, (tenant, session, prompt, output) in enumerate(acts):
            if tenant not in tenants:
                continue
            self.lookup.begin(number, (*prompt, 1), len(prompt) + 1, tenant, session)
            for at in range(0, len(output), 3):
                guess = self.lookup.propose(number, 8)
                if tenant == ANN:
                    self.guesses.append(guess)
                self.lookup.extend(number, output[at : at + 3])
            self.lookup.end(number)
        return self.guesses


acts = st.tuples(st.sampled_from([ANN, BEA]), st.sampled_from([b"", b"x", b"y"]), words, words)


@given(st.lists(acts, max_size=20))
@settings(deadline=None)
def test_what_a_tenant_gets_does_not_depend_on_others(played):
    assert Told().play(played, {ANN, BEA}) == Told().play(played, {ANN})


def test_a_prompt_is_taken_in_once_however_often_it_is_sent(corpora):
    """And the answer, which the next prompt repeats, too."""
    lookup, source = Lookup(LIMITS, corpora), random.Random(3)
    prompt = [source.randrange(5000) for _ in range(1000)]
    answer, more = [7] * 200, [source.randrange(5000) for _ in range(100)]
    run(lookup, prompt, answer, ANN, b"one")
    before = lookup.held
    run(lookup, [*prompt, *answer, *more], [9], ANN, b"one")
    assert lookup.held - before < len(more) + 128, "less than two blocks of 64 are taken in again"
    with running(lookup, more[:20], ANN, b"one"):
        assert lookup.propose(1, 4).tokens == tuple(more[20:24])


def test_branches_of_a_session_are_all_known(corpora):
    lookup, source = Lookup(LIMITS, corpora), random.Random(4)
    branches = [[source.randrange(5000) for _ in range(700)] for _ in range(3)]
    for prompt in branches:
        run(lookup, prompt, [], ANN, b"one")
    before = lookup.held
    for prompt in branches:
        run(lookup, [*prompt, 1, 2, 3], [], ANN, b"one")
    assert lookup.held - before < 3 * 90


def test_what_the_ring_has_lost_is_taken_in_again(corpora):
    lookup, source = Lookup(LIMITS, corpora), random.Random(5)
    prompt = [source.randrange(5000) for _ in range(1000)]
    run(lookup, prompt, [], ANN, b"one")
    run(lookup, [source.randrange(5000) for _ in range(LIMITS.session_tokens)], [], ANN, b"one")
    with running(lookup, prompt, ANN, b"one"):
        assert lookup.propose(1, 4, after=prompt[100:110]).tokens == tuple(prompt[110:114])


def test_the_least_recently_used_go(corpora):
    lookup = Lookup(LIMITS, corpora)
    for number in range(LIMITS.sessions + 1):
        run(lookup, POEM, [], ANN, b"%d" % number)
        run(lookup, POEM, [], ANN, b"0")
    for session, known in ((b"0", True), (b"2", True), (b"1", False)):
        with running(lookup, POEM[:9], ANN, session):
            assert (lookup.propose(1, 1) != NOTHING) is known, session
    run(lookup, [], POEM, BEA, b"")
    for number in range(LIMITS.tenants):
        run(lookup, [], POEM, b"%d" % number, b"")
    for tenant, known in ((b"0", True), (BEA, False)):
        with running(lookup, POEM[:9], tenant, b""):
            assert (lookup.propose(1, 1) != NOTHING) is known, tenant


def test_no_flood_of_one_tenant_pushes_out_what_others_have(corpora):
    lookup, source = Lookup(LIMITS, corpora), random.Random(6)
    run(lookup, POEM, [], BEA, b"hers")
    for number in range(40):
        run(lookup, [source.randrange(5000) for _ in range(3000)], POEM, ANN, b"%d" % number)
        assert lookup.held <= LIMITS.tokens
    with running(lookup, POEM[:9], BEA, b"hers"):
        assert lookup.propose(1, 1) != NOTHING


def test_texts_are_taken_in_by_the_executor_and_nobody_waits(corpora):
    """While its thread does something else a sequence quotes itself alone; afterwards its prompt too."""
    told, busy = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        lookup = Lookup(LIMITS, corpora, executor)
        executor.submit(lambda: (busy.set(), told.wait()))
        assert busy.wait(60)
        try:
            lookup.begin(1, (*POEM, 9, 8, 7, 9, 8), len(POEM), ANN, b"one")
            assert lookup.propose(1, 1).tokens == (7,)
            assert lookup.propose(1, 4, after=POEM[:9]) == NOTHING
        finally:
            told.set()
        executor.submit(int).result()
        assert lookup.propose(1, 4, after=POEM[:9]).tokens == POEM[9:13]
        lookup.end(1)
        executor.submit(int).result()
        with running(lookup, [1, 9, 8], ANN, b"two"):
            executor.submit(int).result()
            assert lookup.propose(1, 1).tokens == (7,)


def test_a_text_that_can_not_be_taken_in_is_said_and_costs_guesses_alone(corpora, caplog):
    with ThreadPoolExecutor(1) as executor:
        lookup = Lookup(LIMITS, corpora, executor)
        lookup.begin(1, [1 << 40, *POEM, 5], len(POEM) + 1, ANN, b"one")
        executor.submit(int).result()
        assert "could not be taken in" in caplog.text and lookup.defects == 1
        assert lookup.propose(1, 4, after=POEM[:9]) == NOTHING
        lookup.end(1)


def test_limits_are_powers_of_two():
    with pytest.raises(ValueError, match="1000 is no power of two"):
        LookupLimits(session_tokens=1000)

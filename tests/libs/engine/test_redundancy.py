"""Copies of busy experts: who gets them, and that a split model says with them what it says in one process."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.libs.engine.rank_threads import in_threads, on_hosts

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward import redundancy
from penstock.engine.forward.redundancy import chosen_copies, expert_copies, imbalance, note_rows
from penstock.runtime.config import ConfigError
from penstock.testing.checkpoints import DEEPSEEK_IN_VECTORS, TINY_DEEPSEEK, TINY_LLAMA_4, TinyModel, write_checkpoint

MIXTRAL = TinyModel(
    architecture="MixtralForCausalLM", layers=2, extra={"num_local_experts": 4, "num_experts_per_tok": 2}
)


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    monkeypatch.setattr(redundancy, "cache_directory", lambda _: tmp_path)


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 3, 4]).flatmap(
        lambda groups: st.tuples(
            st.just(groups),
            st.integers(1, 4).flatmap(
                lambda each: st.lists(
                    st.lists(st.integers(0, 1000), min_size=groups * each, max_size=groups * each),
                    min_size=1,
                    max_size=3,
                )
            ),
        )
    ),
    st.integers(0, 3),
)
def test_copies_make_groups_more_even(case, redundant):
    groups, rows = case
    copies = chosen_copies(rows, groups, redundant)
    assert len(copies) == len(rows)
    each = len(rows[0]) // groups
    for layer in copies:
        for group, own in enumerate(layer):
            assert len(own) == len(set(own)) <= redundant
            assert not set(own) & set(range(group * each, (group + 1) * each)), "it has those anyway"
    assert imbalance(rows, groups, copies) <= imbalance(rows, groups, None) + 1e-9


def test_the_copy_is_the_best_there_is():
    """Of one layer and two groups with a copy each, beside all choices."""
    rows = [[90, 20, 5, 5, 30, 10]]
    choices = [
        (((to_first,) if to_first else (), (to_second,) if to_second is not None else ()),)
        for to_first in (None, 3, 4, 5)
        for to_second in (None, 0, 1, 2)
    ]
    best = min(imbalance(rows, 2, choice) for choice in choices)
    assert imbalance(rows, 2, chosen_copies(rows, 2, 1)) == pytest.approx(best)
    assert best < 1.1 < 1.4 < imbalance(rows, 2, None)


def test_groups_wait_for_each_other_in_each_layer():
    assert imbalance([[4, 0], [0, 4]], 2, None) == 2.0
    assert imbalance([[2, 2], [4, 4]], 2, None) == 1.0
    assert imbalance([[0, 0]], 2, None) == 0.0


def config_of(model, directory, **fields):
    found = inspect(write_checkpoint(directory / "model", model))
    plain = {"kv_pool_tokens": 4096, "max_batch_tokens": 96, "max_running": 8, "threads": 1, "lookup_tokens": 0}
    return found, EngineConfig(model=found.path, **{**plain, "tp": 2, "ep": 2, "redundant_experts": 1, **fields})


def test_copies_are_chosen_by_what_was_counted_and_stay_while_they_are_good(tmp_path):
    """Else each start would pack other weights."""
    found, config = config_of(MIXTRAL, tmp_path)
    assert expert_copies(found, config) is None, "nothing is known"
    note_rows(found, [[0] * 4] * 2)
    assert expert_copies(found, config) is None, "nothing was counted"
    note_rows(found, [[100, 1, 1, 1], [1, 1, 100, 1]])
    first = expert_copies(found, config)
    assert first == (((), (0,)), ((2,), ()))
    note_rows(found, [[100, 1, 1, 4], [1, 4, 100, 1]])
    assert expert_copies(found, config) == first
    for _ in range(8):
        note_rows(found, [[1, 1, 1, 300], [300, 1, 1, 1]])
    later = expert_copies(found, config)
    assert later == (((3,), ()), ((), (0,)))
    assert expert_copies(found, replace(config, redundant_experts=0)) is None
    note_rows(found, ())
    assert expert_copies(found, config) == later


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"redundant_experts": 1, "ep": 1}, "needs ep of 2 or more"),
        ({"redundant_experts": -1}, "must be 0 or more"),
        ({"redundant_experts": 3}, "at most 2"),
    ],
)
async def test_what_is_not_possible_is_refused(tmp_path, fields, right):
    with pytest.raises(ConfigError, match=f"redundant_experts = .*{right}"):
        _, config = config_of(MIXTRAL, tmp_path, **fields)
        async with Engine.open(config):
            pass


@pytest.mark.parametrize(
    ("model", "ranks", "stages", "kernels", "away"),
    [
        (MIXTRAL, 2, 1, True, False),
        (MIXTRAL, 2, 1, False, False),
        (MIXTRAL, 4, 1, True, False),
        (TINY_DEEPSEEK, 2, 1, True, False),
        (DEEPSEEK_IN_VECTORS, 2, 1, True, False),
        (TINY_LLAMA_4, 2, 1, True, False),
        (MIXTRAL, 2, 2, True, False),
        (MIXTRAL, 2, 2, True, True),
        (DEEPSEEK_IN_VECTORS, 2, 3, True, False),
        (TINY_DEEPSEEK, 2, 2, False, True),
    ],
    ids=[
        "mixtral",
        "mixtral, torch",
        "mixtral, 4 ranks",
        "deepseek",
        "deepseek in vectors",
        "llama 4",
        "mixtral, 2 stages",
        "mixtral, 2 hosts",
        "deepseek in vectors, 3 stages",
        "deepseek, 2 hosts, torch",
    ],
)
async def test_a_split_model_says_the_same_with_copies(tmp_path, kit, model, ranks, stages, kernels, away):
    found, config = config_of(model, tmp_path, tp=ranks, pp=stages, kernels=kernels)
    rule = found.config.experts
    note_rows(found, [[100 * sparse] + [1] * (rule.count - 1) for sparse in rule.layers])
    async with Engine.open(replace(config, tp=1, pp=1, ep=1, redundant_experts=0)) as whole:
        expected = await kit.read_all(whole, kit.mixed())
    load = on_hosts(write_checkpoint(tmp_path / "there", model)) if away else in_threads
    async with Engine.open(config, load=load) as split:
        copies = split._runner.ranks.checkpoint.part.rank.copies
        assert all(own == ((), (0,)) for own, sparse in zip(copies, rule.layers, strict=True) if sparse)
        for one, wanted in zip(await kit.read_all(split, kit.mixed()), expected, strict=True):
            kit.assert_same(one, wanted)
        counted = split._runner.expert_rows
        assert split.expert_imbalance == imbalance(counted, 2, copies) != imbalance(counted, 2, None)
    assert redundancy._read(redundancy._note(found), found).rows == [
        [half // 2 + rows for half, rows in zip([100 * sparse] + [1] * (rule.count - 1), own, strict=True)]
        for sparse, own in zip(rule.layers, counted, strict=True)
    ]


@pytest.mark.parametrize("model", [MIXTRAL, TINY_DEEPSEEK], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize(("stages", "away"), [(2, False), (2, True)], ids=["2 stages", "2 hosts"])
async def test_all_stages_are_counted(tmp_path, kit, model, stages, away):
    """Row by row: each token is computed once, and stages count what one does."""
    _, config = config_of(model, tmp_path, redundant_experts=0, draft_tokens=0)
    requests = [kit.request(f"{number}", 30 + 40 * number, kit.greedy(12)) for number in range(3)]
    counts = []
    load = on_hosts(write_checkpoint(tmp_path / "there", model)) if away else in_threads
    for own, way in ((config, in_threads), (replace(config, pp=stages), load)):
        async with Engine.open(own, load=way) as split:
            await kit.read_all(split, requests)
            counts.append((split._runner.expert_rows, split.expert_imbalance))
    assert counts[0] == counts[1]
    assert any(counts[0][0][-1]) and counts[0][1] > 1


async def test_a_row_says_the_same_whatever_is_beside_it(tmp_path, kit):
    """Bit by bit: which group computes a row at an expert that several have does not depend on the batch."""
    found, config = config_of(MIXTRAL, tmp_path)
    note_rows(found, [[100, 1, 1, 1], [1, 1, 100, 1]])
    requests = [kit.request(f"r{number}", 20 + number, kit.greedy(8, logprobs=2)) for number in range(4)]
    async with Engine.open(config, load=in_threads) as split:
        alone = [await kit.read(split, kit.renamed(one, f"{one.id} alone")) for one in requests]
        together = await kit.read_all(split, requests)
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert [token.logprob for token in one.tokens] == [token.logprob for token in other.tokens]

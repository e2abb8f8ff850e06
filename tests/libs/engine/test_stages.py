"""How layers are divided among stages, and steps into pieces."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.errors import RankLost
from penstock.engine.forward import balance
from penstock.engine.forward.balance import divided
from penstock.engine.ranks.messages import PlainRows
from penstock.engine.ranks.stages import PassingRoom, pieces_of, pipes_between, taps_of
from penstock.testing.checkpoints import TinyModel, write_checkpoint

SECONDS = st.floats(0.001, 1)


@given(st.lists(SECONDS, min_size=1, max_size=9), st.integers(1, 4), SECONDS, SECONDS)
def test_the_slowest_stage_is_as_fast_as_it_can_be(layers, stages, before, behind):
    stages = min(stages, len(layers))

    def slowest(bounds):
        took = [sum(layers[own.start : own.stop]) for own in bounds]
        took[0] += before
        took[-1] += behind
        return max(took)

    found = divided(layers, stages, before, behind)
    assert [at for own in found for at in own] == list(range(len(layers))) and all(found)
    ways = itertools.combinations(range(1, len(layers)), stages - 1)
    every = [[*itertools.starmap(range, itertools.pairwise((0, *cuts, len(layers))))] for cuts in ways]
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


@pytest.mark.parametrize("tied", [False, True])
def test_on_cuda_devices_bytes_count(tmp_path, monkeypatch, tied):
    """Those of the embedding and of the last matrix too; nothing is measured."""
    monkeypatch.setattr(balance, "_measured", None)
    found = inspect(write_checkpoint(tmp_path / "model", TinyModel(layers=8, vocab_size=2048, tied=tied)))
    config = EngineConfig(model=found.path, dtype="float32", device="cuda", threads=1)
    assert balance.stage_layers(found, config) == [range(8)]
    layer = sum(info.nbytes for name, info in found.tensors.items() if name.startswith("model.layers.3."))
    end = found.tensors["model.embed_tokens.weight"].nbytes
    assert end > 2 * layer, "so much that it shows"
    stages = balance.stage_layers(found, replace(config, pp=4))
    assert [at for own in stages for at in own] == list(range(8))
    sizes = [layer * len(own) + end * (number in (0, 3)) for number, own in enumerate(stages)]
    assert max(sizes) == layer + end


def test_the_last_matrix_counts():
    """Of equal layers the last stage has fewer."""
    assert divided([1.0] * 8, 2, 0.0, 2.0) == [range(5), range(5, 8)]
    assert divided([1.0] * 8, 2, 0.0, 0.0) == [range(4), range(4, 8)]


RUNS = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from([0, 1, 1, 5]), st.sampled_from([0, 32, 40])), min_size=1, max_size=12
)


@given(RUNS, st.integers(2, 4))
def test_pieces_are_the_step(runs, stages):
    """In its order, each token once, its samples and features at the end; those that verify drafts stay together."""
    order = [
        PlainRows(
            range(1000 * number, 1000 * number + tokens),
            7,
            min(samples, tokens),
            ("x", number),
            [1],
            None,
            featured_tokens=min(featured, tokens),
        )
        for number, (tokens, samples, featured) in enumerate(runs)
    ]
    pieces = pieces_of(order, stages)
    assert all(pieces) and len(pieces) <= 2 * stages
    parts = [part for piece in pieces for part in piece]
    assert [token for part in parts for token in part.ids] == [token for run in order for token in run.ids]
    for run in order:
        own = [part for part in parts if part.table == run.table]
        assert [part.samples for part in own] == [0] * (len(own) - 1) + [run.samples]
        assert [part.start for part in own] == [7 + part.ids[0] - run.ids[0] for part in own]
        last = [token for part in own for token in part.ids[part.tokens - part.featured_tokens :]]
        assert last == [*run.ids[run.tokens - run.featured_tokens :]]
        assert run.samples <= 1 or len(own) == 1
    rows = [sum(part.tokens for part in piece) for piece in pieces]
    if all(run.samples <= 1 < run.tokens for run in order) and sum(rows) >= 256:
        assert len(pieces) > 1 and max(rows) - min(rows[:-1]) <= 1, "all but the last are of one size"


def test_decode_rows_come_together():
    order = [PlainRows([5], 40, 1, ("x", number), [1], None) for number in range(300)]
    assert pieces_of(order, 2) == [order]
    verifying = [PlainRows([5] * 5, 40, 5, ("x", number), [1], None) for number in range(300)]
    assert pieces_of(verifying, 2) == [verifying]


def test_what_is_passed_on_has_room():
    room = PassingRoom(3, 40, 16, 100, layers=5, experts=7, taps=2)
    content = memoryview(bytearray(room.layout.stride))
    states, logits, features, counted = room.views(content)
    assert (states.shape, logits.shape) == ((2, 3, 40, 16), (3, 40, 100))
    assert (features.shape, counted.shape) == ((3, 40, 2, 16), (5, 7))
    states[1, 2, 39], logits[2, 39], features[2, 39, 1], counted[4, 6] = 1.0, 2.0, 3.0, 4
    assert (states.sum(), logits.sum(), features.sum(), counted.sum()) == (16.0, 200.0, 48.0, 4)


@given(st.sets(st.integers(1, 8)), st.integers(1, 8), st.integers(1, 8))
def test_each_tap_is_that_of_one_stage(taps, one, other):
    """That which computes the layer before it, whose number is one less."""
    growing, ends = sorted(taps), sorted({0, one, other, 9})
    for own in itertools.starmap(range, itertools.pairwise(ends)):
        assert growing[taps_of(growing, own)] == [tap for tap in growing if tap - 1 in own]


def test_nobody_waits_for_a_stage_that_has_ended():
    (first, _), (second, other) = pipes_between([2, 2])
    first.tell()
    second.wait()
    other.wait()
    first.close()
    with pytest.raises(RankLost):
        second.wait()
    second.close()
    other.close()
    (first, _), later = pipes_between([2, 2])
    for one in later:
        one.close()
    with pytest.raises(RankLost):
        first.tell()
    first.close()


def test_workers_of_a_host_divide_a_model_alike(tmp_path, monkeypatch):
    """What the first has measured is noted: noise must not give another one other layers, and so other weights."""
    monkeypatch.setattr(balance, "SMALL_BYTES", 0)
    monkeypatch.setattr(balance, "cache_directory", lambda _: tmp_path)
    found = inspect(write_checkpoint(tmp_path / "model", TinyModel()))
    config = EngineConfig(model=found.path, dtype="float32", pp=2, threads=1, kv_pool_tokens=4096)
    first = balance.stage_layers(found, config)
    assert [at for own in first for at in own] == [0, 1, 2] and all(first)
    monkeypatch.setattr(balance, "_measured", None)
    assert balance.stage_layers(found, config) == first
    with pytest.raises(TypeError):
        balance.stage_layers(found, replace(config, pp=3))

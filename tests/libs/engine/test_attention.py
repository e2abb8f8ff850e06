"""Batches over shuffled pages attend as one plain sequence would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint import ModelConfig, Rope
from penstock.engine.layers import attention
from penstock.engine.layers.attention import attend, naive_attend
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.batch import BatchBuilder, arrange
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run

CPU = torch.device("cpu")
WINDOWS = (None, 11)
PARAMS = SamplingParams(max_tokens=1)


def config_of(heads, kv_heads):
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        n_layers=len(WINDOWS),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=8,
        rms_eps=1e-6,
        rope=Rope(),
        max_positions=200,
        tied=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rotary_dim=8,
        windows=WINDOWS,
        attention_scale=0.3,
    )


runs = st.tuples(st.integers(0, 70), st.integers(1, 40), st.integers(0, 4), st.booleans())


@settings(max_examples=40)
@given(
    st.lists(runs, min_size=1, max_size=6),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([None, 2.0]),
    st.integers(0, 10**6),
)
def test_batches_equal_the_naive_loop(shapes, heads, block_size, softcap, seed):
    """Each shape: (tokens before, tokens, drafts, whether the run ends the known tokens)."""
    torch.manual_seed(seed)
    config = config_of(*heads)
    memory = PageMemory(config, 800, block_size, torch.float32, CPU)
    memory.data[1:] = float("nan")
    free = (torch.randperm(800) + 1).tolist()
    members, context = [], {}
    for number, (start, count, drafts, ends) in enumerate(shapes):
        drafts = drafts if ends else 0
        known = [0] * (start + count + (0 if ends else 3))
        choice = Choice(PARAMS, frozenset(), known, 1, (0,) * drafts)
        end = start + count + drafts
        pages = [free.pop() for _ in range(-(-end // block_size))]
        run = Run(choice, start, count, pages, (str(number), 0))
        assert (run.end, run.samples) == (end, 1 + drafts if ends else 0)
        kept = torch.randn(2, 2, len(pages) * block_size, heads[1], 8)
        kept[:, :, end:] = 0.0
        memory.data[pages] = kept.view(2, 2, len(pages), block_size, heads[1], 8).permute(2, 0, 1, 3, 4, 5)
        context[str(number)] = kept[:, :, :end]
        members.append(run)
    order = arrange(members)
    builder = BatchBuilder(memory, CPU, WINDOWS, torch.float32)
    for _ in range(2):  # the second time, indices come from the first
        batch = builder.build(order)
        assert batch.positions.tolist() == [at for run in order for at in range(run.start, run.end)]
        for layer in range(2):
            where = [memory.vectors[batch.places[layer, value]] for value in range(2)]
            wanted = [
                torch.cat([context[run.table[0]][layer, value, run.start :] for run in order]).flatten(1)
                for value in range(2)
            ]
            torch.testing.assert_close(where, wanted)
            check(order, memory, layer, batch.groups, context, heads[0], [run.tokens for run in order], softcap)
            check(order, memory, layer, batch.last_groups, context, heads[0], [run.samples for run in order], softcap)


def check(order, memory, layer, groups, context, heads, rows, softcap):
    """The groups cover the last `rows` of each run, in order, and attend right."""
    query = torch.randn(sum(rows), heads, 8)
    assert sum(group.batch * group.rows for group in groups) == len(query)
    found = []
    for group in groups:
        own = query[group.first : group.first + group.batch * group.rows].view(group.batch, group.rows, heads, 8)
        view = group.contexts[WINDOWS[layer]]
        keys, values = memory.gather(view.index[layer], group.batch, view.tokens)
        found.append(attend(own, keys, values, view.mask, causal=view.causal, scale=0.3, softcap=softcap))
    expected, first = [], 0
    for run, count in zip(order, rows, strict=True):
        keys, values = context[run.table[0]][layer]
        rows_at, own = range(run.end - count, run.end), query[first : first + count]
        expected.append(naive_attend(own, keys, values, rows_at, scale=0.3, window=WINDOWS[layer], softcap=softcap))
        first += count
    if len(query):
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_capped_scores_are_held_a_few_rows_at_a_time(monkeypatch, causal):
    torch.manual_seed(1)
    query, keys, values = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    mask = None if causal else torch.zeros(2, 1, 9, 9).masked_fill_(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    at_once = attend(query, keys, values, mask, causal=causal, scale=0.3, softcap=2.0)
    monkeypatch.setattr(attention, "_MOST_SCORES", 2 * 4 * 9 * 2)
    torch.testing.assert_close(attend(query, keys, values, mask, causal=causal, scale=0.3, softcap=2.0), at_once)
    naive = [naive_attend(query[at], keys[at], values[at], range(9), scale=0.3, softcap=2.0) for at in range(2)]
    torch.testing.assert_close(at_once, torch.cat(naive), atol=1e-5, rtol=1e-5)

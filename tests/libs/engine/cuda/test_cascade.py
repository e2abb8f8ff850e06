"""Who looks at which pages together, against the naive way of finding that out."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.kernels.cuda.cascade import outline, page_order, sharers, work_list
from penstock.engine.kernels.cuda.paged import HostPaged, host_paged


@st.composite
def batches(draw) -> tuple[HostPaged, int]:
    """(sequences that begin with pages of others, or do not; the size of a page)."""
    block = draw(st.sampled_from([1, 4, 5, 16]))
    tables, ends, rows = [], [], []
    unused = (1 + number * 60 % 509 for number in range(508))
    for number in range(draw(st.integers(1, 7))):
        pages = draw(st.integers(1, 12))
        like = tables[draw(st.integers(0, number - 1))] if number and draw(st.booleans()) else []
        same = like[: draw(st.integers(0, min(len(like), pages)))]
        tables.append(same + [next(unused) for _ in range(pages - len(same))])
        ends.append(draw(st.integers((pages - 1) * block + 1, pages * block)))
        rows.append(draw(st.integers(1, min(3, ends[-1]))))
    return host_paged(ends, rows, tables, 14), block


def own_rows(host: HostPaged, sequence: int) -> range:
    return range(int(host.starts[sequence]), int(host.starts[sequence + 1]))


def in_common(host: HostPaged, block: int, one: int, other: int) -> int:
    """How many first pages two sequences have in common that were full before the step."""
    full = min((int(host.ends[each]) - len(own_rows(host, each))) // block for each in (one, other))
    pairs = zip(host.tables[one, :full], host.tables[other, :full], strict=True)
    return next((at for at, (page, its) in enumerate(pairs) if page != its), full)


def naive_groups(host: HostPaged, block: int, chunk: int) -> dict[frozenset[int], set[int]]:
    """By rows, which chunks they look at together."""
    groups: dict[frozenset[int], set[int]] = defaultdict(set)
    for number in range(-(-int(host.ends.max()) // chunk)):
        looking: dict[object, set[int]] = defaultdict(set)
        for sequence, end in enumerate(host.ends.tolist()):
            rows, pages = own_rows(host, sequence), -(-(number + 1) * chunk // block)
            if number * chunk < end:
                full = pages * block <= end - len(rows)
                looking[tuple(host.tables[sequence, :pages]) if full else sequence].update(rows)
        for together in looking.values():
            groups[frozenset(together)].add(number)
    return groups


@given(batches())
def test_neighbours_have_the_most_in_common(batch):
    host, block = batch
    near = page_order(host, block)
    assert sorted(near.order.tolist()) == list(range(len(host.ends)))
    assert near.common[0] == 0
    for at, (one, other) in enumerate(pairwise(near.order.tolist())):
        assert near.common[at + 1] == in_common(host, block, one, other)
    for begin, one in enumerate(near.order.tolist()):
        for end, other in enumerate(near.order[begin + 1 :].tolist(), begin + 1):
            assert in_common(host, block, one, other) <= near.common[begin + 1 : end + 1].min()


@given(batches(), st.sampled_from([8, 12, 32]), st.integers(1, 5), st.integers(1, 9))
def test_the_list_is_the_naive_one(batch, chunk, together, fits):
    """Item for item, but that rows of different launches do not look together."""
    host, block = batch
    work = work_list(outline(host, block, chunk), together, fits)
    assert sorted(work.rows.tolist()) == list(range(host.starts[-1]))
    assert all(
        row in own_rows(host, owner) for row, owner in zip(work.rows.tolist(), work.owners.tolist(), strict=True)
    )
    first = 0
    found: dict[tuple[int, frozenset[int]], list[int]] = defaultdict(list)
    groups = naive_groups(host, block, chunk)
    for part in work.launches:
        inside = work.rows[part.first : part.first + part.rows].tolist()
        owners = set(work.owners[part.first : part.first + part.rows].tolist())
        assert part.first == first and (part.rows <= fits or len(owners) == 1)
        first += part.rows
        assert (np.diff(part.items[:, 0]) >= 0).all()
        for number, begin, end in part.items.tolist():
            rows = work.rows[begin:end].tolist()
            assert 1 <= len(rows) <= together and set(rows) <= set(inside)
            (group,) = (group for group, chunks in groups.items() if set(rows) <= group and number in chunks)
            found[number, group & frozenset(inside)] += rows
    assert first == host.starts[-1]
    expected = {
        (number, group & frozenset(work.rows[part.first : part.first + part.rows].tolist()))
        for part in work.launches
        for group, chunks in groups.items()
        for number in chunks
    }
    assert set(found) == {(number, rows) for number, rows in expected if rows}
    assert all(sorted(rows) == sorted(group) for (_, group), rows in found.items()), "each row once"
    items = sum(len(part.items) for part in work.launches)
    assert items == sum(-(-len(group) // together) for _, group in found)


def test_four_that_share_a_prompt():
    """Two chunks are read once for all of them; what each has of its own, by itself."""
    shared = [7, 3, 9, 4]
    host = host_paged([70, 66, 97, 65], [1, 1, 2, 1], [[*shared, 10 + at, 20 + at, 30 + at] for at in range(4)], 8)
    work = work_list(outline(host, 16, 32), 5, 100)
    items = [(chunk, work.rows[begin:end].tolist()) for chunk, begin, end in work.launches[0].items.tolist()]
    assert items[:2] == [(0, [0, 1, 4, 2, 3]), (1, [0, 1, 4, 2, 3])], "the one that is longest comes last"
    assert items[2:] == [(2, [0]), (2, [1]), (2, [4]), (2, [2, 3]), (3, [2, 3])]


@given(batches(), st.integers(1, 4))
def test_sharers_begin_with_the_same_pages(batch, least):
    host, block = batch
    near = page_order(host, block)
    found = sharers(near, least)
    members = [sequence for group in found for sequence in group.sequences]
    assert len(members) == len(set(members))
    for group in found:
        assert len(group.sequences) >= 2 and group.pages >= least
        for one in group.sequences:
            assert in_common(host, block, group.sequences[0], one) >= group.pages
    saved = sum(group.saved for group in found)
    pairs = near.common[1:]
    assert saved >= max(pairs[pairs >= least], default=0), "no pair alone would save more"
    everything = int(pairs.min(initial=1 << 20))
    assert len(pairs) == 0 or everything < least or saved >= len(pairs) * everything, "nor all together"


def test_sharers_of_more_go_apart():
    """Where families have more in common than all have."""
    tables = [[1, 2, 3, 4, 50], [1, 2, 3, 4, 51], [1, 6, 7, 8, 52], [1, 6, 7, 8, 53]]
    near = page_order(host_paged([17] * 4, [1] * 4, tables, 5), 4)
    assert [(group.sequences, group.pages) for group in sharers(near, 1)] == [([0, 1], 4), ([2, 3], 4)]
    short = page_order(host_paged([9] * 4, [1] * 4, [[1, 2 + at // 2, 50 + at] for at in range(4)], 3), 4)
    assert [(group.sequences, group.pages) for group in sharers(short, 1)] == [([0, 1], 2), ([2, 3], 2)]
    tables = [[1, 2, 3, 4], [1, 5, 50, 51], [1, 2, 3, 6], [1, 7, 52, 53]]
    near = page_order(host_paged([13] * 4, [1] * 4, tables, 4), 4)
    assert sorted((sorted(group.sequences), group.pages) for group in sharers(near, 1)) == [([0, 2], 3), ([1, 3], 1)]
    near = page_order(host_paged([9] * 5, [1] * 5, [[1, 2, 50 + at] for at in range(5)], 3), 4)
    assert [(group.sequences, group.pages) for group in sharers(near, 2)] == [([0, 1, 2, 3, 4], 2)]
    assert sharers(near, 3) == []

"""The Triton kernels of paged attention; `triton_paged` says what they compute. Importing this file needs triton."""

import triton
import triton.language as tl

_CHANGING = ("first_row", "rows", "table_stride")
"""Arguments that change from step to step; kernels are not compiled anew for some of their values."""


@triton.jit(do_not_specialize=_CHANGING)
def partial(
    query,
    keys,
    values,
    tables,
    starts,
    ends,
    order,
    owners,
    items,
    out,
    lse,
    first_row,
    rows,
    table_stride,
    page_stride,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes one item of work: at most M // GROUP query rows, for all query heads of one KV head, over one chunk of
    the context.

    `order` and `owners` are the rows and the sequence of each, in the order of the work list; `items` [items, 3] names
    rows by their places in it, see cascade.py. Items without rows do nothing. With SPLIT, it writes the chunk's result
    to `out` [chunks, rows, HEADS, DIM] and the base-2 logarithm of its weight to `lse` [chunks, rows, HEADS], both
    float32; the logarithm is minus infinity where a row sees nothing of the chunk, and rows are counted in the order of
    the list from `first_row`. Without SPLIT the context fits one chunk, and `out` is the result [rows, HEADS, DIM].
    """
    item = items + tl.program_id(0) * 3
    chunk = tl.load(item)
    from_row = tl.load(item + 1)
    to_row = tl.load(item + 2)
    if from_row >= to_row:
        return
    kv_head = tl.program_id(1)
    m = tl.arange(0, M)
    valid = from_row + m // GROUP < to_row
    place = tl.minimum(from_row + m // GROUP, to_row - 1)
    head = kv_head * GROUP + m % GROUP
    row = tl.load(order + place)
    owner = tl.load(owners + place)
    position = tl.load(ends + owner) - tl.load(starts + owner + 1) + row
    table = tables + tl.load(owners + from_row).to(tl.int64) * table_stride
    low = chunk * CHUNK
    high = tl.minimum(low + CHUNK, tl.max(position, 0) + 1)
    if WINDOWED:
        first_seen = tl.maximum(tl.min(position, 0) - window + 1, 0)
        low = tl.maximum(low, first_seen // TILE * TILE)
    target = row.to(tl.int64) * HEADS + head
    if SPLIT:
        spot = (chunk * rows + place - first_row).to(tl.int64) * HEADS + head
        if low >= high:
            tl.store(lse + spot, tl.full([M], float("-inf"), tl.float32), mask=valid)
            return
    d = tl.arange(0, WIDE)
    q = tl.load(query + target[:, None] * DIM + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, WIDE], tl.float32)
    for at in range(low, high, TILE):
        token = at + tl.arange(0, TILE)
        inside = token < high
        page = tl.load(table + token // BLOCK, mask=inside, other=0)
        where = page.to(tl.int64) * page_stride + (token % BLOCK) * (HEADS // GROUP * DIM) + kv_head * DIM
        present = inside[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + where[:, None] + d[None, :], mask=present, other=0.0)
        v = tl.load(values + where[:, None] + d[None, :], mask=present, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAPPED:  # softcap * tanh(scores / softcap)
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = scores * 1.4426950408889634
        seen = inside[None, :] & (token[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (token[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        anchor = tl.where(better == float("-inf"), 0.0, better)
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(best - anchor)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = better
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    store = valid[:, None] & (d < DIM)[None, :]
    if SPLIT:
        tl.store(lse + spot, best + tl.log2(total), mask=valid)
        tl.store(out + spot[:, None] * DIM + d[None, :], mixed, mask=store)
    else:
        tl.store(out + target[:, None] * DIM + d[None, :], mixed.to(out.dtype.element_ty), mask=store)


@triton.jit(do_not_specialize=_CHANGING[:2])
def merge(
    parts,
    lse,
    starts,
    ends,
    order,
    owners,
    out,
    first_row,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merges the chunks' results of one row and head by their weights, in the order of the chunks."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(order + first_row + place)
    owner = tl.load(owners + first_row + place)
    position = tl.load(ends + owner) - tl.load(starts + owner + 1) + row
    d = tl.arange(0, WIDE)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([WIDE], tl.float32)
    for chunk in range(position // CHUNK + 1):
        spot = (chunk * rows + place).to(tl.int64) * HEADS + head
        weight = tl.load(lse + spot)
        if weight != float("-inf"):
            part = tl.load(parts + spot * DIM + d, mask=d < DIM, other=0.0)
            better = tl.maximum(best, weight)
            fade = tl.exp2(best - better)
            share = tl.exp2(weight - better)
            total = total * fade + share
            mixed = mixed * fade + part * share
            best = better
    target = row.to(tl.int64) * HEADS + head
    tl.store(out + target * DIM + d, (mixed / total).to(out.dtype.element_ty), mask=d < DIM)

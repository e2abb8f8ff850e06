"""All of `penstock bench engine`."""

from __future__ import annotations

import statistics

import torch

from penstock.bench.engine import embedded, figures, own
from penstock.bench.engine.cells import sessions
from penstock.bench.engine.limits import Memory, gemm_rate
from penstock.bench.engine.rounds import THREADS, CellRow
from penstock.bench.engine.rounds import measure as measure_session
from penstock.bench.engine.shapes import BIG, SMALL, LlamaShape, checkpoint, weight_bytes
from penstock.bench.engine.subjects import OURS, Places
from penstock.bench.harness import BenchReport, Figure, figure

_GEMM = {"float32": torch.float32, "bfloat16": torch.bfloat16}


async def measure(quick: bool) -> BenchReport:
    """Runs the bench."""
    torch.set_num_threads(THREADS)
    places = Places.default()
    memory = Memory(THREADS)
    gemm = _gemm()
    rows: list[CellRow] = []
    for session in sessions(quick):
        rows += await measure_session(session, places, memory)
    found = [*figures.compared(rows), *_decoding(rows, places)]
    found += await own.measure(places, memory, quick)
    found += await own.start(places, quick)
    found += await own.overhead(quick)
    found += await embedded.measure(quick)
    for name, rates in _gemm().items():
        gemm[name] += rates
    return BenchReport("engine", [*found, *figures.rates(rows), *figures.memory_rates(rows), *_limits(gemm, rows)])


def _decoding(rows: list[CellRow], places: Places) -> list[Figure]:
    """What else there is to say of decoding alone."""
    big, small = (weight_bytes(checkpoint(shape, places.models)) for shape in (BIG, SMALL))

    def beside(id: str, cell: str, name: str, goal: float | None) -> Figure:
        """Our first subject of a sitting : another one of it."""
        wanted = (BIG.name, cell, name)
        others = [row for row in rows if (row.shape, row.cell, row.subject.name) == wanted and row.samples != row.first]
        return figures.beside_best(id, others, goal)

    def share(id: str, shape: LlamaShape, name: str, weights: int, goal: float | None = None) -> Figure:
        return figures.beside_memory(id, figures.find(rows, shape.name, "decode_b1", name), weights, goal)

    return [
        beside("decode_b1_1b_int8_vs_llamacpp", "decode_b1", "llamacpp int8", 1.0),
        beside("decode_b1_1b_int4_vs_llamacpp", "decode_b1", "llamacpp int4", 1.0),
        beside("decode_b8_1b_int4_vs_llamacpp", "decode_b8", "llamacpp int4", None),
        beside("decode_b1_1b_int4_vs_int8", "decode_b1", f"{OURS} int8", 1.5),
        beside("decode_b8_1b_int4_vs_int8", "decode_b8", f"{OURS} int8", 1.0),
        share("decode_b1_1b_bf16_vs_bandwidth", BIG, OURS, big, 0.85),
        share("decode_b1_1b_bf16_llamacpp_vs_bandwidth", BIG, "llamacpp", big),
        share("decode_b1_1b_bf16_openvino_vs_bandwidth", BIG, "openvino", big),
        share("decode_b1_135m_bf16_vs_bandwidth", SMALL, OURS, small),
    ]


def _gemm() -> dict[str, list[float]]:
    return {name: [gemm_rate(dtype)] for name, dtype in _GEMM.items()}


def _limits(gemm: dict[str, list[float]], rows: list[CellRow]) -> list[Figure]:
    """torch's products, and how far a long prompt on the big shape is from them."""
    found = [
        figure(f"gemm_{name}_gflops", [rate / 1e9 for rate in rates], "GFLOP/s", "torch, 512 rows, first and last")
        for name, rates in gemm.items()
    ]
    row = figures.find(rows, BIG.name, "prefill_512", "penstock")
    if row is not None:
        best = max(statistics.median(rates) for rates in gemm.values())
        work = 2.0 * BIG.layers * BIG.layer_parameters
        shares = [sample.rate * work / best for sample in row.samples if sample.rate is not None]
        found.append(figure("prefill_512_1b_vs_gemm", shares, "ratio", "torch's better product, layers' matrices only"))
    return found

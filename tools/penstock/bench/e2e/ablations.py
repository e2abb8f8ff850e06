"""What parts of the mesh are worth: `penstock up` with the embedded model, and the same with one of them switched off.

The two run side by side and are loaded by turns with the same agents' sessions. Answers are greedy, so both generate
the same tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from penstock.bench.e2e.cells import LoadCell, Values, values
from penstock.bench.e2e.loads import AgentLoad, LoadStage
from penstock.bench.e2e.running import Server, free_port, serving
from penstock.bench.e2e.servers import MESH, MeshForm, up
from penstock.bench.engine.process import Failed
from penstock.bench.harness import Figure, Measure, figure, interleave, missing
from penstock.checkpoint import inspect
from penstock.load.asking import AskFailed
from penstock.models import embedded

_MODEL = "penstock-mini"
_ON, _OFF = "on", "off"


@dataclass(frozen=True, slots=True)
class Ablation:
    """One part, and how the mesh is started without it and with it."""

    name: str
    off: MeshForm
    on: MeshForm = field(default_factory=MeshForm)
    """As it comes, unless the part needs more than that to be there."""
    words: str = ""
    """What is different without it."""


_TWO = ("--aggregated", "--decode", "2")
_NO_LOANS = {"PENSTOCK_DECODE_LEND": "false"}
ABLATIONS = (
    Ablation(
        "affinity",
        MeshForm(_TWO, {"PENSTOCK_ROUTER_POLICY": "least-tokens"}),
        MeshForm(_TWO),
        "of two workers the one with fewer tokens, wherever the session's KV is",
    ),
    Ablation(
        "store", MeshForm(("--kv-host-bytes", "2MiB"), _NO_LOANS), words="a store with room for a few blocks, no loans"
    ),
    Ablation(
        "shared_pages",
        MeshForm(("--resident-share", "0"), _NO_LOANS),
        words="no page stays for later requests, or is lent to the store",
    ),
    Ablation("draft", MeshForm(("--draft", "none", "--draft-tokens", "0")), words="no drafts"),
    Ablation(
        "disaggregation",
        MeshForm(("--aggregated",)),
        MeshForm(("--prefill", "1")),
        "one worker for prefill and decode instead of one for each",
    ),
)
COMPARED: Mapping[str, str] = {
    "tokens_per_s": "output_token_throughput",
    "turn1_ttft": "time_to_first_token_turn1_p50",
    "turn2_ttft": "time_to_first_token_turn2_p50",
}
"""Ends of figures, and the values that they are ratios of."""
_SCALES: Mapping[str, tuple[str, str]] = {"tokens_per_s": ("output_token_throughput", "tokens/s")}


async def ablation_figures(quick: bool, rounds: int, wanted: Sequence[str] = ()) -> list[Figure]:
    """`ablation_NAME_END`, off : on, of each part; of those that are wanted, all without names."""
    load = AgentLoad(sessions=4, turns=2, output=32) if quick else AgentLoad(sessions=8)
    cell = LoadCell("ablation", load)
    found: list[Figure] = []
    for ablation in ABLATIONS:
        if not wanted or ablation.name in wanted:
            found += await _ablated(ablation, cell, rounds)
    return found


async def _ablated(ablation: Ablation, cell: LoadCell, rounds: int) -> list[Figure]:
    try:
        async with _serving(ablation.on) as on, _serving(ablation.off) as off:
            samples = await interleave({_ON: _subject(on, cell), _OFF: _subject(off, cell)}, rounds)
    except (Failed, AskFailed) as error:
        return [missing(f"ablation_{ablation.name}_{end}", "ratio", str(error)) for end in COMPARED]
    figures = ratios(ablation, samples[_ON], samples[_OFF])
    print(f"{ablation.name}: { ({one.id: one.value for one in figures}) }", file=sys.stderr, flush=True)
    return figures


def ratios(ablation: Ablation, on: Sequence[Values], off: Sequence[Values]) -> list[Figure]:
    """Without the part : with it, round by round."""
    found = [
        figure(
            f"ablation_{ablation.name}_{end}",
            [without[value] / with_it[value] for without, with_it in zip(off, on, strict=True)],
            "ratio",
            f"the mesh with it; without: {ablation.words}",
        )
        for end, value in COMPARED.items()
    ]
    for state, samples in ((_ON, on), (_OFF, off)):
        for end, (value, unit) in _SCALES.items():
            id = f"ablation_{ablation.name}_{state}_{end}"
            found.append(figure(id, [sample[value] for sample in samples], unit, "for scale"))
    return found


def _serving(form: MeshForm) -> AbstractAsyncContextManager[Server]:
    port = free_port()
    return serving(up(MESH, embedded(_MODEL), port, form), port)


def _subject(server: Server, cell: LoadCell) -> Measure[Values]:
    stage = LoadStage(server.target, inspect(embedded(_MODEL)).config.vocab_size)

    async def sample(round: int) -> Values:
        return values(await cell.run(stage, round))

    return sample

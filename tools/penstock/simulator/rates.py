"""A worker's rates as figures: `penstock bench router` keeps them, `penstock simulate --rates` reads them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.router.workers import StepCost
from penstock.simulator.workers import WorkerModel

UNITS = {
    "rates_prefill_tokens_per_s": "tokens/s",
    "rates_prefill_context_s": "s",
    "rates_step_base_s": "s",
    "rates_step_sequence_s": "s",
    "rates_step_token_s": "s",
    "rates_fetch_bytes_per_s": "B/s",
}
"""Of each figure."""
_BENCH = "`penstock bench router --part simulator --json`"


class RatesError(ValueError):
    """A file without a worker's rates; the text says why."""


class _KeptFigure(msgspec.Struct):
    id: str
    value: float | None


class _KeptReport(msgspec.Struct):
    figures: list[_KeptFigure]


def rates(model: WorkerModel) -> dict[str, float]:
    """Those of a worker, by figure."""
    return {
        "rates_prefill_tokens_per_s": model.prefill_rate,
        "rates_prefill_context_s": model.prefill_context_s,
        "rates_step_base_s": model.step.base_s,
        "rates_step_sequence_s": model.step.sequence_s,
        "rates_step_token_s": model.step.token_s,
        "rates_fetch_bytes_per_s": model.fetch_rate,
    }


def read_rates(path: Path) -> WorkerModel:
    """A worker with the rates of a kept report; all else is as in any model. Raises RatesError."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_KeptReport)
    except FileNotFoundError:
        raise RatesError(f"no such file; {_BENCH} prints one") from None
    except (OSError, ValueError) as error:
        raise RatesError(f"not what {_BENCH} prints: {error}") from None
    found = {one.id: one.value for one in kept.figures if one.value is not None}
    lacking = [id for id in UNITS if id not in found]
    if lacking:
        raise RatesError(f"it has no {', '.join(lacking)}; {_BENCH} measures and prints them")
    for id in UNITS:
        if found[id] < 0 or (found[id] == 0 and id.endswith("_per_s")):
            right = "above 0" if id.endswith("_per_s") else "at least 0"
            raise RatesError(f"{id} is {found[id]:g} and must be {right}, as {_BENCH} prints it")
    return WorkerModel(
        prefill_rate=found["rates_prefill_tokens_per_s"],
        prefill_context_s=found["rates_prefill_context_s"],
        step=StepCost(found["rates_step_base_s"], found["rates_step_sequence_s"], found["rates_step_token_s"]),
        fetch_rate=found["rates_fetch_bytes_per_s"],
    )

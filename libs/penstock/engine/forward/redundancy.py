"""Which experts have copies in more than one group of ranks: those that most rows have chosen lately.

A step lasts as long as its busiest group. With an expert in two groups, each computes half of the rows that choose it
(as in DeepSeek's EPLB, 2025). Copies are chosen when an engine opens, by what earlier ones that could have some have
counted of the same model, and stay until it closes: what a row gives depends on where its experts are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.checkpoint import Checkpoint, ExpertCopies, remembered_fingerprint
from penstock.engine.config import EngineConfig
from penstock.runtime.caches import cache_directory
from penstock.runtime.notes import read_note, write_note
from penstock.runtime.private import locked

_EVEN = 1.05
"""Rows of the busiest group : the mean, at which no more copies are worth their memory."""
_BETTER = 0.95
"""Other copies are chosen where steps are hoped to take at most this share of the time: with them weights are packed
anew."""
_log = logging.getLogger(__name__)

Loads = Sequence[Sequence[int]]
"""By layer and expert: rows."""


class _Known(msgspec.Struct):
    """What a note says of a model."""

    rows: list[list[int]]
    """As they were counted, those of earlier engines for less."""
    groups: int = 1
    redundant: int = 0
    copies: list[list[list[int]]] = msgspec.field(default_factory=list)
    """What was chosen last, for so many groups and redundant experts."""


def expert_copies(checkpoint: Checkpoint, config: EngineConfig) -> ExpertCopies | None:
    """The copies that the groups of an engine have; None: none, or nothing is known yet. Workers of a host that open
    together choose alike, so that they share the memory of packed weights."""
    if not config.redundant_experts:
        return None
    with suppress(OSError):
        note = _note(checkpoint)
        with locked(note.parent):
            known = _read(note, checkpoint)
            if known is None:
                _log.info("no expert has copies yet: which are busy is known when an engine has closed")
                return None
            kept = (known.groups, known.redundant) == (config.ep, config.redundant_experts)
            before = _copies(known.copies) if kept else None
            copies = chosen_copies(known.rows, config.ep, config.redundant_experts)
            now, then = (imbalance(known.rows, config.ep, some) for some in (copies, before))
            if before is not None and now > _BETTER * then:
                copies, now = before, then
            known.groups, known.redundant = config.ep, config.redundant_experts
            known.copies = [[list(own) for own in groups] for groups in copies]
            write_note(note, msgspec.json.encode(known).decode())
            plain = imbalance(known.rows, config.ep, None)
            _log.info("copies of experts: the busiest group should have %.2f times the mean, not %.2f", now, plain)
            return copies
    return None


def note_rows(checkpoint: Checkpoint, rows: Loads) -> None:
    """Adds what an engine has counted to what is known of its model; earlier rows count half."""
    if not any(map(any, rows)):
        return
    with suppress(OSError):
        note = _note(checkpoint)
        with locked(note.parent):
            known = _read(note, checkpoint) or _Known([[0] * len(own) for own in rows])
            known.rows = [
                [before // 2 + now for before, now in zip(*own, strict=True)]
                for own in zip(known.rows, rows, strict=True)
            ]
            write_note(note, msgspec.json.encode(known).decode())


def chosen_copies(rows: Loads, groups: int, redundant: int) -> ExpertCopies:
    """Copies for each layer, at most `redundant` of them in each group, and none where groups are even."""
    return tuple(_of_layer(np.asarray(own, np.float64), groups, redundant) for own in rows)


def imbalance(rows: Loads, groups: int, copies: ExpertCopies | None) -> float:
    """Rows of the busiest group : the mean, layer by layer, since groups wait for each other in each; 0: no rows."""
    busiest = total = 0.0
    for layer, own in enumerate(rows):
        owned = _owned(len(own), groups)
        for group, copied in enumerate(copies[layer] if copies else ()):
            owned[list(copied), group] = True
        loads = _loads(np.asarray(own, np.float64), owned)
        busiest += float(loads.max())
        total += float(loads.sum())
    return busiest * groups / total if total else 0.0


def _of_layer(rows: npt.NDArray[np.float64], groups: int, redundant: int) -> tuple[tuple[int, ...], ...]:
    """Gives the busiest group's experts to the least busy one that has room, one by one: each time the one that makes
    the loads most even."""
    owned = _owned(len(rows), groups)
    copied: list[list[int]] = [[] for _ in range(groups)]
    loads = _loads(rows, owned)
    while loads.max() > _EVEN * loads.mean():
        best: tuple[float, int, int] | None = None
        even = float(np.square(loads).sum())
        busy: list[int] = np.flatnonzero(owned[:, int(loads.argmax())] & (rows > 0)).tolist()
        for expert in busy:
            free = [group for group in range(groups) if not owned[expert, group] and len(copied[group]) < redundant]
            if not free:
                continue
            group = min(free, key=lambda one: loads[one])
            after = _with(loads, rows, owned, expert, group)
            left = float(np.square(after).sum())
            if left <= even if best is None else left < best[0]:
                best = left, expert, group
        if best is None:
            break
        _, expert, group = best
        loads = _with(loads, rows, owned, expert, group)
        owned[expert, group] = True
        copied[group].append(expert)
    return tuple(tuple(sorted(own)) for own in copied)


def _owned(experts: int, groups: int) -> npt.NDArray[np.bool_]:
    """[experts, groups]: which group has which without copies."""
    return np.equal.outer(np.arange(experts) // (experts // groups), np.arange(groups))


def _loads(rows: npt.NDArray[np.float64], owned: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """[groups]: the rows that each computes."""
    found: npt.NDArray[np.float64] = (rows / owned.sum(1)) @ owned
    return found


def _with(
    loads: npt.NDArray[np.float64],
    rows: npt.NDArray[np.float64],
    owned: npt.NDArray[np.bool_],
    expert: int,
    group: int,
) -> npt.NDArray[np.float64]:
    """The loads when the group has a copy of the expert as well."""
    have = owned[expert]
    count = int(have.sum())
    after: npt.NDArray[np.float64] = loads + have * (rows[expert] * (1 / (count + 1) - 1 / count))
    after[group] += rows[expert] / (count + 1)
    return after


def _note(checkpoint: Checkpoint) -> Path:
    return cache_directory("experts") / remembered_fingerprint(checkpoint)


def _read(note: Path, checkpoint: Checkpoint) -> _Known | None:
    """None where nothing is known."""
    word, experts = read_note(note), checkpoint.config.experts
    if word is None or experts is None:
        return None
    try:
        known = msgspec.json.decode(word, type=_Known)
    except msgspec.DecodeError:  # of another version
        return None
    sizes = {len(own) for own in known.rows}
    return known if len(known.rows) == len(experts.layers) and sizes == {experts.count} else None


def _copies(found: Sequence[Sequence[Sequence[int]]]) -> ExpertCopies:
    return tuple(tuple(tuple(own) for own in groups) for groups in found)

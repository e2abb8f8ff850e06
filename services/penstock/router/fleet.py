"""The members in columns, so that few of many workers need a close look: those that could be best for a request.

For each worker a floor is known: seconds that a request takes there at least. The floors of all are computed at once.
Whoever has a floor above what the best of a few takes is no better than that one, and is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.router.demand import Demand
from penstock.router.index import BlockIndex
from penstock.router.registry import Registry, Seat
from penstock.router.workers import Role, WorkerState

_RATES_S = 1.0
"""Seconds for which a belief in rates stands."""
_TIE = 1e-6
"""Of equals, such as those that are idle, the ones that have had less to do of late are looked at: by so little of it
each floor is higher."""
_LISTEN_S = 0.25
"""Seconds for which nobody is thought to have gone silent."""

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]

_NOBODY = (np.empty(0, np.intp), np.empty(0, np.intp))
_MOST_MASKS = 4096
"""Sets of members whose columns are kept: those of the blocks that many prompts begin with come again and again."""
_ROWS = 16
_QUEUE, _TOKEN, _CONTEXT, _FETCH, _REMOTE, _PULL, _STEP, _OWN, _HEARD, _OPEN, _DELAY, _RATE = range(_ROWS - 4)
"""Of a worker: seconds until it computes something new; to compute the KV of one token, and for half a token before it;
to fetch it from its own store, and from another host's; of each fetch from there, apart from its bytes; for a step of
one more sequence, and what each token of its context adds; when it was last heard of; 1 as long as it may get work; how
many sequences lose the seconds of a prompt that it computes beside them; tokens of prompts per second."""
_HANDOFF = slice(_ROWS - 4, _ROWS)
"""Seconds of each hand-off to it, and for each token of it: by way of its own store; and of another host's."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the leading blocks of one prompt are."""

    held: Floats
    """Leading blocks that a member holds itself, by column."""
    hosts: Floats
    """Leading blocks in the stores of a host, by number; -1: it has no store."""
    stores: Sequence[tuple[int, Numbers]]
    """The columns of stores that hold some, by depth in blocks, ascending."""
    depths: Sequence[int]
    """All depths at which some member ends, ascending; 0 is one of them."""

    @property
    def deepest(self) -> int:
        """Leading blocks in the store that holds most."""
        return self.stores[-1][0] if self.stores else 0


class Fleet:
    """A view of the registry."""

    def __init__(self, registry: Registry, observe: Callable[[Seat, float], WorkerState], *, silent_s: float) -> None:
        """`observe` says what is known of a worker at a time."""
        self._registry = registry
        self._observe = observe
        self._silent_s = silent_s
        self._seats: list[Seat] = []
        self._states: list[WorkerState | None] = []
        """None: a store."""
        self._columns: dict[str, int] = {}
        self._hosts: dict[str, int] = {}
        self._host_of: Numbers = np.empty(0, np.intp)
        self._stores = np.empty(0, bool)
        self._has_store = np.empty(0, bool)
        self._of_model: dict[str, tuple[Numbers, Numbers]] = {}
        """Those that decode, and those that only compute prompts."""
        self._available: dict[str, tuple[Numbers, Numbers]] = {}
        """Of these the ones that may get work."""
        self._listened_at = -np.inf
        self._limits: Floats = np.empty(0)
        self._least_limit = 0.0
        """Of all workers."""
        self._matrix: Floats = np.zeros((_ROWS, 0))
        """What is known of each worker, in its column; the rows are named above."""
        self._believed_at = -np.inf
        self._laid_out_at = -1
        self._of_bit: Numbers = np.empty(0, np.intp)
        """Columns by the number of a member's bit in the index; -1: nobody's."""
        self._of_mask: dict[int, Numbers] = {}
        """The columns of members by the bits of all of them."""
        self._of_bit_at = (-1, -1)
        """The versions of index and registry for which both hold."""

    def seat(self, column: int) -> Seat:
        """Who sits there."""
        return self._seats[column]

    def state(self, column: int) -> WorkerState:
        """What is known of the worker there."""
        state = self._states[column]
        assert state is not None, "a store gets no work"
        return state

    def known(self, member_id: str) -> WorkerState | None:
        """What is known of a worker; None: it has left, or is no worker."""
        column = self._columns.get(member_id)
        return None if column is None else self._states[column]

    def prefill_rate(self, model: str) -> float:
        """Tokens per second of all workers of `model` that compute prompts and may get work."""
        decode, prefill = self._available.get(model, _NOBODY)
        columns = prefill if len(prefill) else decode
        return float(self._matrix[_RATE, columns].sum())

    def column(self, member_id: str) -> int | None:
        """Where a member sits."""
        return self._columns.get(member_id)

    def host(self, host_id: str) -> int:
        """The number of a member's host."""
        return self._hosts[host_id]

    def refresh(self, now: float) -> None:
        """Makes the columns what is known now."""
        if self._laid_out_at != self._registry.version:
            self._lay_out()
        changed = self._registry.changed
        if now - self._believed_at > _RATES_S:
            changed.update(self._columns)
            self._believed_at = now
        for member in changed:
            column = self._columns.get(member)
            if column is not None and self._seats[column].member.role is not None:
                self._take(column, now)
        changed.clear()
        if now - self._listened_at > _LISTEN_S:
            self._find_available(now)

    def place(self, index: BlockIndex, keys: Sequence[bytes]) -> Placed:
        """Where the leading blocks of a prompt are."""
        held = np.zeros(len(self._seats))
        hosts = np.where(self._has_store, 0.0, -1.0)
        deep, depths = [], [0]
        for depth, mask in index.ends(keys):
            depths.append(depth)
            columns = self._with_bits(index, mask)
            held[columns] = depth
            stores = columns[self._stores[columns]]
            if len(stores):
                hosts[self._host_of[stores]] = depth
                deep.append((depth, stores))
        return Placed(held, hosts, deep, depths)

    def decoders(self, model: str) -> Numbers:
        """The columns of workers of `model` that decode and may get work."""
        return self._available.get(model, _NOBODY)[0]

    def prefillers(self, model: str) -> Numbers:
        """The columns of workers of `model` that only compute prompts and may get work."""
        return self._available.get(model, _NOBODY)[1]

    def anyone(self, model: str) -> Seat | None:
        """One of the workers of `model` that may get work."""
        for columns in self._available.get(model, _NOBODY):
            if len(columns):
                return self.seat(columns[0])
        return None

    def roomy(self, columns: Numbers, tokens: int) -> Numbers:
        """Those of them that can hold so many tokens."""
        return columns if tokens <= self._least_limit else columns[self._limits[columns] >= tokens]

    def most_room(self, columns: Numbers) -> int:
        """Tokens that the roomiest of them can hold."""
        return int(self._limits[columns].max())

    def prompt_floors(self, demand: Demand, columns: Numbers, placed: Placed, size: int) -> Floats:
        """Seconds until these workers, in ascending columns, have the KV of the prompt, at least, whose blocks have
        `size` tokens."""
        most = demand.prompt_tokens - 1
        at = _span(columns)
        queue, token, context, fetch, remote, pull = self._matrix[:6, at]
        own = np.minimum(placed.held[at] * size, most)
        deepest = min(placed.deepest * size, most)
        floors: Floats = queue + _computed_s(own, demand.prompt_tokens, token, context)
        if deepest:
            stored = placed.hosts[self._host_of[at]] * size
            near = np.maximum(own, np.where(stored < 0, deepest, np.minimum(stored, most)))
            fetched_s = (near - own) * fetch
            rest_s = _computed_s(near, demand.prompt_tokens, token, context)
            floors = np.minimum(floors, np.maximum(queue, fetched_s) + rest_s)
            pulled_s = fetched_s + pull + (deepest - near) * remote
            rest_s = _computed_s(deepest, demand.prompt_tokens, token, context)
            floors = np.where(near < deepest, np.minimum(floors, np.maximum(queue, pulled_s) + rest_s), floors)
        return floors

    def queue_floors(self, columns: Numbers) -> Floats:
        """Likewise for those that compute the whole prompt for others."""
        floors: Floats = self._matrix[_QUEUE, columns]
        return floors

    def moved_floors(
        self, demand: Demand, columns: Numbers, prompts: tuple[Numbers, Floats], placed: Placed, size: int
    ) -> Floats:
        """Seconds until the workers in `columns`, ascending, have the KV of a prompt that one of others computes, at
        least. `prompts`: the columns of those others, and the floors of their prompts."""
        at = _span(columns)
        own = np.minimum(placed.held[at] * size, demand.prompt_tokens)
        each_s, token_s, far_each_s, far_token_s = self._matrix[_HANDOFF, at]
        hosts = self._host_of[at]
        stored = placed.hosts[hosts] * size
        near = np.maximum(own, np.minimum(stored, demand.prompt_tokens))
        whole = each_s + (demand.prompt_tokens - own) * token_s
        pulled = far_each_s + (near - own) * token_s + (demand.prompt_tokens - near) * far_token_s
        others, floors = prompts
        beside, alone = np.full(len(self._hosts), np.inf), np.inf
        np.minimum.at(beside, self._host_of[others], floors)
        storeless = ~self._has_store[self._host_of[others]]
        if storeless.any():
            alone = floors[storeless].min()  # what they compute lies with any store
        any_floor = floors.min() if len(floors) else np.inf
        apart = any_floor + np.where(self._has_store[hosts], np.minimum(pulled, whole), whole)
        moved: Floats = np.minimum(np.minimum(beside[hosts], alone) + whole, apart)
        return moved

    def delay_floors(self, demand: Demand, columns: Numbers, placed: Placed, size: int) -> Floats:
        """Seconds that the sequences of these workers, in ascending columns, lose at least by a prompt that is computed
        beside them."""
        at, most = _span(columns), demand.prompt_tokens - 1
        known = np.minimum(np.maximum(placed.held[at], placed.deepest) * size, most)
        token, context = self._matrix[_TOKEN : _CONTEXT + 1, at]
        delays: Floats = self._matrix[_DELAY, at] * _computed_s(known, demand.prompt_tokens, token, context)
        return delays

    def beside(self, columns: Numbers, floors: Floats, host: int) -> int | None:
        """The one of `columns` on a host that has the lowest floor."""
        there = np.flatnonzero(self._host_of[columns] == host)
        return int(columns[there[floors[there].argmin()]]) if len(there) else None

    def host_of(self, column: int) -> int:
        """The number of a member's host."""
        return int(self._host_of[column])

    def answer_floors(self, demand: Demand, columns: Numbers) -> Floats:
        """Seconds that the expected answer takes these workers, in ascending columns, at least."""
        expected, at = demand.expected_output, _span(columns)
        floors: Floats = expected * (self._matrix[_STEP, at] + expected * self._matrix[_OWN, at])
        return floors

    def _find_available(self, now: float) -> None:
        heard = (now - self._matrix[_HEARD] <= self._silent_s) & (self._matrix[_OPEN] > 0)
        self._available = {
            model: (decode[heard[decode]], prefill[heard[prefill]])
            for model, (decode, prefill) in self._of_model.items()
        }
        self._listened_at = now

    def _take(self, column: int, now: float) -> None:
        seat = self._seats[column]
        before = self._matrix[:, column]
        silent, was_silent = (now - at > self._silent_s for at in (seat.well_at, before[_HEARD]))
        if before[_OPEN] != (not seat.draining) or silent != was_silent:
            self._listened_at = -np.inf  # whether it may get work has changed, or may have
        state = self._states[column] = self._observe(seat, now)
        self._matrix[:, column] = (
            state.queue_s + _TIE * state.recent_s,
            state.prompt.token_s,
            state.prompt.context_s / 2,
            state.fetch_s,
            state.remote_fetch_s,
            state.remote_overhead_s,
            state.step.seconds(state.sequences + 1, state.context_tokens),
            state.step.token_s,
            seat.well_at,
            not seat.draining,
            state.delayed if state.role is Role.DECODE else 0,
            state.prefill_rate,
            *state.handoff,
            *state.far_handoff,
        )

    def _lay_out(self) -> None:
        """Gives everybody a column anew."""
        before, self._seats = self._seats, sorted(self._registry, key=_kind)
        states = dict(zip(before, self._states, strict=True))
        self._states = [states.get(seat) for seat in self._seats]
        there = {seat: column for column, seat in enumerate(before)}
        matrix = np.zeros((len(self._matrix), len(self._seats)))
        kept = [(column, there[seat]) for column, seat in enumerate(self._seats) if seat in there]
        if kept:
            new, old = np.array(kept).T
            matrix[:, new] = self._matrix[:, old]
        self._matrix = matrix
        members = [seat.member for seat in self._seats]
        self._registry.changed.update(seat.member.id for seat in self._seats if seat not in there)
        self._columns = {member.id: column for column, member in enumerate(members)}
        self._hosts = {name: number for number, name in enumerate(dict.fromkeys(one.host_id for one in members))}
        self._host_of = np.array([self._hosts[member.host_id] for member in members], np.intp)
        self._stores = np.array([member.role is None for member in members], bool)
        self._has_store = np.bincount(self._host_of[self._stores], minlength=len(self._hosts)) > 0
        self._limits = np.array([min(one.max_model_len, one.kv_capacity_tokens) for one in members], float)
        self._least_limit = self._limits[~self._stores].min(initial=np.inf)
        of_model: dict[str, tuple[list[int], list[int]]] = {}
        for column, member in enumerate(members):
            if member.role is not None:
                of_model.setdefault(member.model, ([], []))[member.role is Role.PREFILL].append(column)
        self._of_model = {
            model: (np.array(decode, np.intp), np.array(prefill, np.intp))
            for model, (decode, prefill) in of_model.items()
        }
        self._available = {}
        self._listened_at = -np.inf
        self._laid_out_at = self._registry.version

    def _with_bits(self, index: BlockIndex, mask: int) -> Numbers:
        """The columns of the members with these bits in the index."""
        if self._of_bit_at != (index.version, self._laid_out_at):
            bits = dict(index.bits())
            self._of_bit = np.full(max(bits, default=-1) + 1, -1, np.intp)
            for bit, member in bits.items():
                self._of_bit[bit] = self._columns.get(member, -1)
            self._of_mask.clear()
            self._of_bit_at = (index.version, self._laid_out_at)
        if (known := self._of_mask.get(mask)) is not None:
            return known
        octets = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        columns = self._of_bit[np.unpackbits(octets, bitorder="little").nonzero()[0]]
        if len(self._of_mask) >= _MOST_MASKS:
            self._of_mask.clear()
        found = self._of_mask[mask] = columns[columns >= 0]
        return found


def _computed_s(known: Floats | float, tokens: int, token_s: Floats, half_context_s: Floats) -> Floats:
    """Seconds to compute a prompt of so many tokens, of which the first are `known`: PromptTokenCost.seconds."""
    return (tokens - known) * (token_s + half_context_s * (known + tokens))


def _kind(seat: Seat) -> tuple[str, bool]:
    """Those of one model and of one kind of work sit beside each other."""
    return seat.member.model, seat.member.role is Role.PREFILL


def _span(columns: Numbers) -> slice | Numbers:
    """Ascending columns; as a slice, which copies nothing, when none between them is left out."""
    if not len(columns):
        return columns
    first, last = columns.item(0), columns.item(-1)
    return slice(first, last + 1) if last - first + 1 == len(columns) else columns

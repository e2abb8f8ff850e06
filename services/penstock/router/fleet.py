"""The members in columns, so that few of many workers need a close look: those that could be best for a request.

For each worker a floor is known: seconds that a request takes there at least. The floors of all are computed at once.
Whoever has a floor above what the best of a few takes is no better than that one, and is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.router.demand import Demand
from penstock.router.index import BlockIndex
from penstock.router.registry import Registry, Seat
from penstock.router.workers import Role, WorkerState

_STANDS_S = 1.0
"""Seconds after which what is known of a worker that says nothing is observed again: beliefs fade."""
_MOST_FADED = 16
"""Workers of one refresh that are observed for that reason alone."""
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
_ROWS = 22
(
    _QUEUE,
    _TOKEN,
    _CONTEXT,
    _FETCH,
    _REMOTE,
    _PULL,
    _STEP,
    _OWN,
    _HEARD,
    _OPEN,
    _DELAY,
    _RATE,
    _SPARE,
    _HELD,
    _CROWD,
    _LEFT,
    _CROWDED,
    _ALONE,
) = range(_ROWS - 4)
"""Of a worker: seconds until it computes something new; to compute the KV of one token, and for half a token before it;
to fetch it from its own store, and from another host's; of each fetch from there, apart from its bytes; for a step of
one more sequence, and what each token of its context adds; when it was last heard of; 1 as long as it may get work; how
many sequences lose the seconds of a prompt that it computes beside them; tokens of prompts per second; tokens for which
it has room; tokens that its sequences have, or are promised; the part of these that has to end for one more place in
the batch; tokens that each of them has still to generate, in the mean, 0 where nobody knows; seconds of their step; 1
if no hand-off is of use to it."""
_HANDOFF = slice(_ROWS - 4, _ROWS)
"""Seconds of each hand-off to it, and for each token of it: by way of its own store; and of another host's."""


class Observing(Protocol):
    """Says what is known of workers."""

    def state(self, seat: Seat, now: float) -> WorkerState:
        """Everything."""

    def charged(self, seat: Seat, state: WorkerState, now: float) -> WorkerState:
        """Likewise, when nothing but its charges has changed since `state`, which is the answer if nothing has."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the leading blocks of one prompt are."""

    held: Floats
    """Leading blocks that a member holds itself, by column."""
    hosts: Floats
    """Leading blocks in the stores of a host, by number; -1: it has no store."""
    near: Floats
    """Leading blocks in the store that workers of a host use, by number: those of a host without a store use any."""
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

    def __init__(self, registry: Registry, observer: Observing, *, silent_s: float) -> None:
        self._registry = registry
        self._observer = observer
        self._silent_s = silent_s
        self._seats: list[Seat] = []
        self._states: list[WorkerState | None] = []
        """None: a store."""
        self._columns: dict[str, int] = {}
        self._hosts: dict[str, int] = {}
        self._host_of: Numbers = np.empty(0, np.intp)
        self._stores = np.empty(0, bool)
        self._has_store = np.empty(0, bool)
        self._no_depths: Floats = np.empty(0)
        """Those of a prompt of which nothing is stored, as in `Placed.hosts`."""
        self._all_have_stores = True
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
        self._observed: dict[int, float] = {}
        """When each worker was observed, by column: the one of whom nothing was heard for longest first."""
        self._laid_out_at = -1
        self._of_bit: Numbers = np.empty(0, np.intp)
        """Columns by the number of a member's bit in the index; -1: nobody's."""
        self._of_mask: dict[int, tuple[Numbers, Numbers, Numbers]] = {}
        """As `_with_bits` finds them."""
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
        prefill = self.prefillers(model)
        columns = prefill if len(prefill) else self.decoders(model)
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
        changed, charged = self._registry.changed, self._registry.charged
        for member in changed:
            column = self._columns.get(member)
            if column is not None and self._seats[column].member.role is not None:
                self._take(column, now)
        for member in charged:
            column = self._columns.get(member)
            if column is not None and member not in changed:
                self._charge(column, now)
        changed.clear()
        charged.clear()
        for _ in range(_MOST_FADED):
            column = next(iter(self._observed), None)
            if column is None or now - self._observed[column] <= _STANDS_S:
                break
            self._take(column, now)
        if now - self._listened_at > _LISTEN_S:
            self._find_available(now)

    def place(self, index: BlockIndex, keys: Sequence[bytes]) -> Placed:
        """Where the leading blocks of a prompt are."""
        held = np.zeros(len(self._seats))
        hosts = self._no_depths.copy()
        deep, depths = [], [0]
        for depth, mask in index.ends(keys):
            depths.append(depth)
            columns, stores, theirs = self._with_bits(index, mask)
            held[columns] = depth
            if len(stores):
                hosts[theirs] = depth
                deep.append((depth, stores))
        deepest = deep[-1][0] if deep else 0
        near = hosts if self._all_have_stores else np.where(hosts < 0, deepest, hosts)
        return Placed(held, hosts, near, deep, depths)

    def decoders(self, model: str) -> Numbers:
        """The columns of workers of `model` that decode and may get work."""
        return self._available.get(model, _NOBODY)[0]

    def prefillers(self, model: str) -> Numbers:
        """The columns of workers of `model` that only compute prompts, have a store to hand them on, and may get
        work."""
        columns = self._available.get(model, _NOBODY)[1]
        return columns[self._matrix[_ALONE, columns] == 0] if len(columns) else columns

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
        `size` tokens. What is placed ends before the prompt's last token."""
        at = _span(columns)
        queue, token, context, fetch, remote, pull = self._matrix[:6, at]
        own, tokens = placed.held[at] * size, demand.prompt_tokens
        floors: Floats = queue + _computed_s(own, tokens, token, context)
        if placed.deepest:
            near, deepest = np.maximum(own, placed.near[self._host_of[at]] * size), placed.deepest * size
            fetched_s = (near - own) * fetch
            np.minimum(floors, np.maximum(queue, fetched_s) + _computed_s(near, tokens, token, context), out=floors)
            pulled_s = fetched_s + pull + (deepest - near) * remote
            pulled_s = np.maximum(queue, pulled_s) + _computed_s(deepest, tokens, token, context)
            np.minimum(floors, pulled_s, out=floors)
        return floors

    def queue_floors(self, columns: Numbers) -> Floats:
        """Likewise for those that compute the whole prompt for others."""
        floors: Floats = self._matrix[_QUEUE, columns]
        return floors

    def moved_floors(
        self, demand: Demand, columns: Numbers, prompts: tuple[Numbers, Floats], placed: Placed, size: int
    ) -> Floats:
        """Seconds until the workers in `columns`, ascending, have the KV of a prompt that one of others computes, at
        least; without end for those to which a hand-off is of no use. `prompts`: the columns of those others, and the
        floors of their prompts."""
        at = _span(columns)
        own, tokens = placed.held[at] * size, demand.prompt_tokens
        each_s, token_s, far_each_s, far_token_s = self._matrix[_HANDOFF, at]
        hosts = self._host_of[at]
        near = np.maximum(own, placed.hosts[hosts] * size)
        whole = each_s + (tokens - own) * token_s
        apart = np.minimum(whole, far_each_s + (near - own) * token_s + (tokens - near) * far_token_s)
        beside, least = self._by_host(*prompts)
        if not self._all_have_stores:
            apart = np.where(self._has_store[hosts], apart, whole)
        moved: Floats = np.where(self._matrix[_ALONE, at] > 0, np.inf, np.minimum(beside[hosts] + whole, least + apart))
        return moved

    def delay_floors(self, demand: Demand, columns: Numbers, shared_tokens: int) -> Floats:
        """Seconds that the sequences of these workers, in ascending columns, lose at least by a prompt that is computed
        beside them, of which at most `shared_tokens` need not be computed."""
        at, known = _span(columns), min(shared_tokens, demand.prompt_tokens - 1)
        token, context = self._matrix[_TOKEN : _CONTEXT + 1, at]
        delays: Floats = self._matrix[_DELAY, at] * _computed_s(known, demand.prompt_tokens, token, context)
        return delays

    def beside(self, columns: Numbers, floors: Floats, host: int) -> int | None:
        """The one of `columns` on a host that has the lowest floor."""
        first, last = np.searchsorted(self._host_of[columns], (host, host + 1))
        return int(columns[first + floors[first:last].argmin()]) if first < last else None

    def host_of(self, column: int) -> int:
        """The number of a member's host."""
        return self._host_of.item(column)

    def answer_floors(self, demand: Demand, columns: Numbers, shared_tokens: int) -> Floats:
        """Seconds that the expected answer takes these workers, in ascending columns, at least, whose sequences have at
        most `shared_tokens` of the prompt already."""
        at = _span(columns)
        own = np.minimum(_own_tokens(demand, shared_tokens), np.maximum(0.0, self._matrix[_SPARE, at]))
        floors: Floats = demand.expected_output * (self._matrix[_STEP, at] + own * self._matrix[_OWN, at])
        return floors

    def room_floors(self, demand: Demand, columns: Numbers, shared_tokens: int) -> Floats | None:
        """Seconds until these workers, in ascending columns, have room for the whole request, at least; None: all
        have."""
        at, own = _span(columns), _own_tokens(demand, shared_tokens)
        spare, held, crowd, left, crowded_s = self._matrix[_SPARE : _CROWDED + 1, at]
        if own <= spare.min() and crowd.max() <= 0:
            return None
        part = np.where(held > 0, np.clip(np.maximum((own - spare) / np.maximum(held, 1.0), crowd), 0.0, 1.0), 0.0)
        floors: Floats = part * 2 * np.where(left > 0, left, demand.expected_output / 2) * crowded_s
        return floors

    def _by_host(self, columns: Numbers, floors: Floats) -> tuple[Floats, float]:
        """The lowest floor of the workers of each host, which are in ascending columns; those without a store count for
        every host, since what they compute lies with any. And the lowest of all."""
        beside = np.full(len(self._hosts), np.inf)
        if not len(columns):
            return beside, np.inf
        hosts = self._host_of[columns]
        first = np.empty(len(hosts), bool)
        first[0] = True
        np.not_equal(hosts[1:], hosts[:-1], out=first[1:])
        starts = first.nonzero()[0]
        beside[hosts[starts]] = np.minimum.reduceat(floors, starts)
        if not self._all_have_stores:
            np.minimum(beside, beside[~self._has_store].min(), out=beside)
        return beside, float(floors.min())

    def _find_available(self, now: float) -> None:
        heard = (now - self._matrix[_HEARD] <= self._silent_s) & (self._matrix[_OPEN] > 0)
        self._available = {
            model: (decode[heard[decode]], prefill[heard[prefill]])
            for model, (decode, prefill) in self._of_model.items()
        }
        self._listened_at = now

    def _take(self, column: int, now: float) -> None:
        seat = self._seats[column]
        was_open, heard_at = self._matrix.item(_OPEN, column), self._matrix.item(_HEARD, column)
        silent, was_silent = now - seat.well_at > self._silent_s, now - heard_at > self._silent_s
        if was_open != (not seat.draining) or silent != was_silent:
            self._listened_at = -np.inf  # whether it may get work has changed, or may have
        state = self._states[column] = self._observer.state(seat, now)
        self._observed.pop(column, None)
        self._observed[column] = now
        self._matrix[:, column] = (
            state.queue_s + _TIE * state.recent_s,
            state.prompt.token_s,
            state.prompt.context_s / 2,
            state.fetch_s,
            state.remote_fetch_s,
            state.remote_overhead_s,
            *_one_more(state),
            seat.well_at,
            not seat.draining,
            state.delayed if state.role is Role.DECODE else 0,
            state.prefill_rate,
            *_room(state),
            state.alone,
            *state.handoff,
            *state.far_handoff,
        )

    def _charge(self, column: int, now: float) -> None:
        before = self._states[column]
        assert before is not None, "only workers are charged, and a new one is observed first"
        state = self._states[column] = self._observer.charged(self._seats[column], before, now)
        rows = self._matrix
        rows[_QUEUE, column] = state.queue_s + _TIE * state.recent_s
        rows[_DELAY, column] = state.delayed if state.role is Role.DECODE else 0
        rows[_STEP, column], rows[_OWN, column] = _one_more(state)
        rows[_SPARE : _CROWDED + 1, column] = _room(state)

    def _lay_out(self) -> None:
        """Gives everybody a column anew."""
        before, self._seats = self._seats, sorted(self._registry, key=_place)
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
        self._hosts = {name: number for number, name in enumerate(sorted({one.host_id for one in members}))}
        self._host_of = np.array([self._hosts[member.host_id] for member in members], np.intp)
        self._stores = np.array([member.role is None for member in members], bool)
        self._has_store = np.bincount(self._host_of[self._stores], minlength=len(self._hosts)) > 0
        self._no_depths = np.where(self._has_store, 0.0, -1.0)
        self._all_have_stores = bool(self._has_store.all())
        self._limits = np.array([min(one.max_model_len, one.kv_capacity_tokens) for one in members], float)
        self._least_limit = self._limits[~self._stores].min(initial=np.inf)
        of_model: dict[str, tuple[list[int], list[int]]] = {}
        for column, member in enumerate(members):
            if member.role is not None:
                of_model.setdefault(member.model, ([], []))[member.role is Role.PREFILL].append(column)
        for name, adapted in self._registry.adapted().items():
            for seat in adapted.seats:
                column = self._columns[seat.member.id]
                of_model.setdefault(name, ([], []))[seat.member.role is Role.PREFILL].append(column)
        self._of_model = {
            model: (np.array(sorted(decode), np.intp), np.array(sorted(prefill), np.intp))
            for model, (decode, prefill) in of_model.items()
        }
        at = {seat: self._observed.get(column, -np.inf) for column, seat in enumerate(before)}
        workers = [(at.get(seat, -np.inf), column) for column, seat in enumerate(self._seats) if seat.member.role]
        self._observed = {column: seconds for seconds, column in sorted(workers)}
        self._available = {}
        self._listened_at = -np.inf
        self._laid_out_at = self._registry.version

    def _with_bits(self, index: BlockIndex, mask: int) -> tuple[Numbers, Numbers, Numbers]:
        """The columns of the members with these bits in the index, those of the stores among them, and their hosts."""
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
        columns = columns[columns >= 0]
        stores = columns[self._stores[columns]]
        found = self._of_mask[mask] = columns, stores, self._host_of[stores]
        return found


def _one_more(state: WorkerState) -> tuple[float, float]:
    """Seconds of a step of one more sequence, and what each token of its context adds, as in `step_s`."""
    sequences = min(state.sequences + 1, state.max_running)
    return (
        state.step.seconds(sequences, min(state.context_tokens, state.kv_capacity_tokens)),
        state.step.token_s,
    )


def _room(state: WorkerState) -> tuple[float, float, float, float, float]:
    """The rows from _SPARE to _CROWDED, as in `room_s`."""
    sequences, held, capacity = state.sequences, state.context_tokens, state.kv_capacity_tokens
    crowd = (sequences + 1 - state.max_running) / max(1, sequences)
    step_s = state.step.seconds(min(sequences, state.max_running), min(held, capacity))
    return capacity - held, held, crowd, state.left_tokens, step_s


def _own_tokens(demand: Demand, shared_tokens: int) -> int:
    """Of the whole request, those of which no other sequence has the KV, at least."""
    return demand.expected_output + demand.prompt_tokens - min(shared_tokens, demand.prompt_tokens)


def _place(seat: Seat) -> tuple[str, bool, str]:
    """Those of one model and of one kind of work sit beside each other, and among these those of one host."""
    return seat.member.model, seat.member.role is Role.PREFILL, seat.member.host_id


def _computed_s(known: Floats | float, tokens: int, token_s: Floats, half_context_s: Floats) -> Floats:
    """Seconds to compute a prompt of so many tokens, of which the first are `known`: PromptTokenCost.seconds."""
    return (tokens - known) * (token_s + half_context_s * (known + tokens))


def _span(columns: Numbers) -> slice | Numbers:
    """Ascending columns; as a slice, which copies nothing, when none between them is left out."""
    if not len(columns):
        return columns
    first, last = columns.item(0), columns.item(-1)
    return slice(first, last + 1) if last - first + 1 == len(columns) else columns

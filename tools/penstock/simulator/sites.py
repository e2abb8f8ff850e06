"""Several sites before modelled workers: a request moves by the rule by which a gateway moves it
(docs/regions.md).

Distances are those of real places. A signal needs a second for 200,000 km of glass, and a cable takes some 1.4 times
the shortest way: 2 * 1.4 / 200 milliseconds a kilometre there and back.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import asin, cos, inf, radians, sin, sqrt

from penstock.errors import PenstockError
from penstock.gateway.mesh.spilling import Prospect
from penstock.router.line import HeldAsk
from penstock.router.plans import Planned
from penstock.simulator.simulation import Served, SimulatedMesh, Simulation, not_computed
from penstock.traces.reading import RecordedAsk, Trace

PLACES: Mapping[str, tuple[float, float]] = {
    "frankfurt": (50.11, 8.68),
    "london": (51.51, -0.13),
    "mumbai": (19.08, 72.88),
    "osaka": (34.69, 135.50),
    "sao-paulo": (-23.55, -46.63),
    "singapore": (1.35, 103.82),
    "sydney": (-33.87, 151.21),
    "tokyo": (35.68, 139.69),
    "virginia": (39.04, -77.49),
    "oregon": (45.84, -119.70),
}
"""Degrees north and east."""
_EARTH_KM = 6371.0
_DETOUR, _KM_PER_S = 1.4, 200_000.0


def way_s(one: str, two: str) -> float:
    """Seconds there and back between two of PLACES, by the haversine formula."""
    north, east = map(radians, PLACES[one])
    to_north, to_east = map(radians, PLACES[two])
    half = sin((to_north - north) / 2) ** 2 + cos(north) * cos(to_north) * sin((to_east - east) / 2) ** 2
    return 2 * _DETOUR * 2 * _EARTH_KM * asin(sqrt(half)) / _KM_PER_S


@dataclass(frozen=True, slots=True)
class SitesResult:
    """What became of all requests, by the place whose clients sent them."""

    requests: Mapping[str, Sequence[Served]]
    spilled: Counter[tuple[str, str]]
    """Requests that were served elsewhere: from where, to where."""

    @property
    def all(self) -> list[Served]:
        """Those of all places."""
        return [*itertools.chain.from_iterable(self.requests.values())]

    @property
    def hit(self) -> float:
        """The part of all prompt tokens that was not computed."""
        return not_computed(self.all)

    def percentile(self, part: float) -> float:
        """Seconds until tokens follow each other; those that were refused wait for ever."""
        values = sorted(inf if one.refused else one.started_s for one in self.all)
        return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


class SitesSimulation:
    """One run."""

    def __init__(self, meshes: Mapping[str, SimulatedMesh], block_tokens: int, *, spill_s: float = 1.0) -> None:
        """A mesh at each of some PLACES; `spill_s` as the gateway's --spill-s, `inf` for sites that know nobody."""
        self._spill_s = spill_s
        self._sites = {place: Simulation(mesh, Trace(place, block_tokens, ())) for place, mesh in meshes.items()}
        self._spilled: Counter[tuple[str, str]] = Counter()

    def run(self, asks: Mapping[str, Sequence[RecordedAsk]]) -> SitesResult:
        """Serves what the clients of each place ask."""
        served = {place: [Served(ask.at, ask.tokens) for ask in own] for place, own in asks.items()}
        comes = [
            (ask.at, place, ask, one)
            for place, own in asks.items()
            for ask, one in zip(own, served[place], strict=True)
        ]
        for at, place, ask, one in sorted(comes, key=lambda row: row[:2]):
            for site in self._sites.values():
                site.until(at)
            self._serve(place, ask, one)
        for site in self._sites.values():
            site.until(inf)
        return SitesResult(served, self._spilled)

    def _serve(self, home: str, ask: RecordedAsk, served: Served) -> None:
        """As penstock.gateway.mesh.sites does."""
        here = self._sites[home]
        found = here.enter(ask, served)
        expected = _expected(found)
        if expected.wait_s > self._spill_s:
            offers = [(place, self._sites[place].enter(ask, served)) for place in self._sites if place != home]
            plans = [(place, offer) for place, offer in offers if isinstance(offer, Planned)]
            taken = min(plans, key=lambda plan: _expected(plan[1]).answer_s + way_s(home, plan[0]), default=None)
            if taken and not expected.ends_sooner(_expected(taken[1]), way_s(home, taken[0])):
                taken = None
            for place, offer in offers:
                if taken is None or offer is not taken[1]:
                    self._sites[place].withdraw(offer)
            if taken:
                here.withdraw(found)
                self._go(home, *taken, ask, served)
                return
        here.accept(ask, served, found)

    def _go(self, home: str, place: str, planned: Planned, ask: RecordedAsk, served: Served) -> None:
        self._spilled[home, place] += 1
        served.back_s = way_s(home, place) / 2
        there = self._sites[place]
        there.later(way_s(home, place) / 2, partial(there.place, ask, served, planned))


def _expected(found: Planned | HeldAsk | PenstockError) -> Prospect:
    if isinstance(found, Planned):
        chosen = found.decision.chosen
        return Prospect(chosen.prompt.queue_s + chosen.room_s, chosen.first_token_s, chosen.total_s)
    return Prospect(found.wait_s if isinstance(found, HeldAsk) else inf)


def days(
    places: Iterable[str], *, sessions: int, day_s: float, block_tokens: int, seed: int = 1
) -> dict[str, list[RecordedAsk]]:
    """What agents ask in a day of `day_s` seconds, squeezed from 24 hours: as many sessions at each place, most of them
    in its afternoon. A session has a prefix of its own that grows with each of some ten turns."""
    source = random.Random(seed)
    found: dict[str, list[RecordedAsk]] = {}
    for place in places:
        noon = (0.5 - PLACES[place][1] / 360) % 1.0
        asks: list[RecordedAsk] = []
        for number in range(sessions):
            while True:  # what is as likely as the height of the sun, with some who work by night
                at = source.random()
                if source.random() < 0.15 + 0.85 * max(0.0, math.cos(2 * math.pi * (at - noon))):
                    break
            asks += _session(f"{place}-{number}", at * day_s, source, block_tokens)
        found[place] = sorted(asks, key=lambda ask: ask.at)
    return found


def _session(name: str, at: float, source: random.Random, block_tokens: int) -> Iterable[RecordedAsk]:
    own = f"{name}/".encode()
    tokens = source.randrange(2_000, 6_000)
    for _ in range(source.randrange(4, 16)):
        keys = tuple(own + number.to_bytes(4, "big") for number in range(tokens // block_tokens))
        output = source.randrange(50, 400)
        yield RecordedAsk(at, tokens, output, keys, name)
        tokens += output + source.randrange(200, 2_500)
        at += source.uniform(5.0, 25.0)

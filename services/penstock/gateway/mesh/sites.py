"""Several sites, each with workers, stores and routers of its own: where a request is served.

Nothing of a site's state is kept elsewhere. Its routers alone know what its workers have to do and which prefixes its
stores hold, so they are asked: a gateway takes the plan of its own site unless that predicts a long wait; then it asks
the others too, and takes the plan with the fewest seconds until the end of the answer, the way included
(`penstock.gateway.mesh.spilling`). A session is at home where its gateway is; no table says where it has been.

The way is one round trip, measured at each ask: it is what the first token takes longer, and the others come as fast as
they are made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import TypeVar

import structlog

from penstock.errors import Overloaded, PenstockError, Unavailable
from penstock.gateway.mesh.plans import Answer, AskRouter, HeldBack, PlanStream, RouterCalls
from penstock.gateway.mesh.spilling import Prospect
from penstock.gateway.mesh.view import RouterView
from penstock.gateway.request.work import Assignment, ChoiceRequest, Reason
from penstock.kv.hint import ReturnHint
from penstock.rpc.channels import Channels
from penstock.v1 import router_pb2

_FAR_S = 2.0
"""Most seconds for the plan of another site."""
_SLACK = 1.1
"""By how much the shortest way that was seen grows with each that was longer: ways change."""

Result = TypeVar("Result")
Spilled = Callable[[str, str], None]
"""Called with the name of a site that takes a request, and why its own does not: sooner, full or away."""


@dataclass(slots=True)
class Site:
    """Where workers are."""

    calls: RouterCalls
    way_s: float = 0.0
    """There and back."""

    @property
    def name(self) -> str:
        """As the settings have it."""
        return self.calls.site

    def took(self, seconds: float) -> None:
        """An ask took so long."""
        self.way_s = min(seconds, self.way_s * _SLACK) if self.way_s else seconds


@dataclass(frozen=True, slots=True)
class Offer:
    """A site's plan, which is charged there until its stream is closed."""

    site: Site
    stream: PlanStream
    chosen: Assignment

    @property
    def expected(self) -> Prospect:
        """What its router predicts, without the way."""
        return _expected(self.chosen)

    @property
    def seconds(self) -> float:
        """Until the end of the answer, the way included."""
        return self.site.way_s + self.expected.answer_s


class Sites:
    """All sites, for all requests."""

    def __init__(self, channels: Channels, view: RouterView, *, spill_s: float, spilled: Spilled) -> None:
        """No other site is asked for a request that is predicted to wait for `spill_s` at most."""
        self._view = view
        self._sites = [Site(RouterCalls(channels, view, name)) for name in view.sites()]
        self.spill_s = spill_s
        self.spilled = spilled
        self._log = structlog.get_logger("penstock.gateway")

    @property
    def own(self) -> Site:
        """This gateway's."""
        return self._sites[0]

    def plans(self, remaining: Callable[[], float]) -> SitePlans | PlanStream:
        """The plans of one choice; `remaining` gives the seconds until the request's deadline."""
        return SitePlans(self, remaining) if len(self._sites) > 1 else self.own.calls.plans(remaining)

    def serves(self, site: Site, model: str) -> bool:
        """Whether a request for the model could be placed there now."""
        return self._view.serves_at(site.name, model)

    def others(self, site: Site, model: str) -> list[Site]:
        """Those besides `site` that serve the model, the nearest first."""
        return [other for other in self._sites if other is not site and self.serves(other, model)]

    async def hint(self, session: str, hint: ReturnHint) -> None:
        """Tells the stores of all sites, as any may have the session. Raises Unavailable when those of this site can't
        be told; another that can't be reached keeps what it has until its room is needed."""
        own, *others = await self._each(lambda calls: calls.hint(session, hint))
        for site, told in zip(self._sites[1:], others, strict=True):
            if isinstance(told, PenstockError):
                self._log.warning("a site does not hear of a session", site=site.name, error=told.message)
        if isinstance(own, PenstockError):
            raise own

    async def of_all(self, ask: AskRouter[Answer]) -> list[Answer]:
        """The answers of all routers of all sites that can be reached. Raises PenstockError when none can."""
        found = await self._each(lambda calls: calls.of_all(ask))
        heard = [answers for answers in found if not isinstance(answers, PenstockError)]
        if not heard and isinstance(found[0], PenstockError):
            raise found[0]
        return [*chain.from_iterable(heard)]

    async def evict(self, request: router_pb2.EvictRequest) -> list[router_pb2.MemberEvicted]:
        """Has the members of all sites drop a tenant's blocks. Raises PenstockError when a site can't be told: the
        others have been."""
        members: list[router_pb2.MemberEvicted] = []
        for dropped in await self._each(lambda calls: calls.evict(request)):
            if isinstance(dropped, PenstockError):
                raise dropped
            members += dropped
        return members

    async def _each(self, call: Callable[[RouterCalls], Awaitable[Result]]) -> list[Result | PenstockError]:
        """What the routers of each site say, or why they say nothing, this gateway's first."""

        async def said(calls: RouterCalls) -> Result | PenstockError:
            try:
                return await call(calls)
            except PenstockError as error:
                return error

        return await asyncio.gather(*(said(site.calls) for site in self._sites))


class SitePlans:
    """The plans of one choice, which are those of one site at a time. Made by `Sites.plans`."""

    def __init__(self, sites: Sites, remaining: Callable[[], float]) -> None:
        self._sites = sites
        self._remaining = remaining
        self._site = sites.own
        self._stream = self._site.calls.plans(remaining)

    async def ask(self, request: ChoiceRequest, generated: int, avoid: Mapping[str, Reason]) -> Assignment:
        """Workers, which replace those of an earlier plan. Raises as PlanStream.ask does."""
        others = [] if request.yields else self._sites.others(self._site, request.model)
        if not others:
            return self._named(await self._stream.ask(request, generated, avoid))
        if not self._sites.serves(self._site, request.model):
            if offer := await self._sooner(Prospect(inf), others, request, generated, avoid):
                return self._take(offer, "away")
            return self._named(await self._stream.ask(request, generated, avoid))
        try:
            chosen = await self._stream.ask(request, generated, avoid, waits=False)
        except HeldBack as held:
            if offer := await self._sooner(Prospect(held.wait_s), others, request, generated, avoid):
                return self._take(offer, "full")
            return self._named(await self._stream.when_there_is_room(request, generated, avoid))
        except (Overloaded, Unavailable) as fault:
            if offer := await self._sooner(Prospect(inf), others, request, generated, avoid):
                return self._take(offer, "full" if isinstance(fault, Overloaded) else "away")
            raise
        if offer := await self._sooner(_expected(chosen), others, request, generated, avoid):
            return self._take(offer, "sooner")
        return self._named(chosen)

    @property
    def gone(self) -> bool:
        """See PlanStream."""
        return self._stream.gone

    async def progress(self, generated: int) -> None:
        """See PlanStream."""
        await self._stream.progress(generated)

    async def farewell(self, generated: int, hint: ReturnHint, *, waits_for_tool: bool) -> None:
        """See PlanStream."""
        await self._stream.farewell(generated, hint, waits_for_tool=waits_for_tool)

    def close(self) -> None:
        """Releases all charges."""
        self._stream.close()

    def _take(self, offer: Offer, why: str) -> Assignment:
        self._stream.close()
        self._site, self._stream = offer.site, offer.stream
        self._sites.spilled(offer.site.name, why)
        return self._named(offer.chosen)

    def _named(self, chosen: Assignment) -> Assignment:
        return replace(chosen, site=self._site.name)

    async def _sooner(
        self,
        here: Prospect,
        others: Sequence[Site],
        request: ChoiceRequest,
        generated: int,
        avoid: Mapping[str, Reason],
    ) -> Offer | None:
        """The soonest of the plans that the others give at once, if it ends sooner than `here`; all others are
        released. None where the request does not wait for long."""
        if here.wait_s <= self._sites.spill_s:
            return None
        streams = [site.calls.plans(self._remaining) for site in others]

        async def offer(site: Site, stream: PlanStream) -> Offer | None:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(_FAR_S):
                    chosen = await stream.ask(request, generated, avoid, waits=False)
            except (PenstockError, HeldBack, TimeoutError):
                return None
            site.took(time.perf_counter() - began)
            return Offer(site, stream, chosen)

        taken: Offer | None = None
        try:
            found = await asyncio.gather(*map(offer, others, streams))
            best = min(filter(None, found), key=lambda one: one.seconds, default=None)
            if best is not None and here.ends_sooner(best.expected, best.site.way_s):
                taken = best
            return taken
        finally:
            for stream in streams:
                if taken is None or stream is not taken.stream:
                    stream.close()


def _expected(chosen: Assignment) -> Prospect:
    reasons = chosen.reasons
    if reasons is None:
        return Prospect(0.0)
    return Prospect(reasons.queue_s + reasons.room_s, reasons.first_token_s, reasons.answer_s)

"""Which of several routers plans for this gateway: one until it fails, then another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

View = TypeVar("View")


@dataclass(slots=True)
class _Heard(Generic[View]):
    view: View
    useful: bool


class RouterChoice(Generic[View]):
    """The routers that answer, with what each says, and the one that is asked first."""

    def __init__(self, routers: Sequence[str]) -> None:
        """`routers`: addresses, at least one; of equally good ones an earlier is preferred."""
        self._routers = list(routers)
        self._heard: dict[str, _Heard[View]] = {}
        self._failed: set[str] = set()
        """Those that did not plan when they were asked, until they say something new."""
        self.chosen = self._routers[0]

    @property
    def view(self) -> View | None:
        """What the chosen router says; None: it does not answer, and neither does another."""
        heard = self._heard.get(self.chosen)
        return heard.view if heard else None

    @property
    def views(self) -> Mapping[str, View]:
        """What each router that answers says."""
        return {router: heard.view for router, heard in self._heard.items()}

    def order(self) -> list[str]:
        """All of them, in the order in which to ask: the chosen one first."""
        return sorted(self._routers, key=lambda router: (router != self.chosen, *self._rank(router)))

    def heard(self, router: str, view: View, *, useful: bool) -> None:
        """It says `view`; `useful`: by which it could place a request."""
        self._heard[router] = _Heard(view, useful)
        self._failed.discard(router)
        self._choose()

    def lost(self, router: str) -> None:
        """It does not answer any more."""
        self._heard.pop(router, None)
        self._choose()

    def failed(self, router: str) -> None:
        """It did not plan when it was asked."""
        self._failed.add(router)
        self._choose()

    def _choose(self) -> None:
        """Stays with the chosen one while none is better: to change costs what only that one knows."""
        best = min(self._routers, key=self._rank)
        if self._rank(best) < self._rank(self.chosen):
            self.chosen = best

    def _rank(self, router: str) -> tuple[bool, bool, bool]:
        """Less is better."""
        heard = self._heard.get(router)
        return router in self._failed, heard is None, heard is None or not heard.useful

"""The models that the gateway serves, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import islice

from penstock.errors import NotFound, PenstockError
from penstock.gateway.completing.completer import Completer
from penstock.gateway.completing.completion import Caller, Completion
from penstock.gateway.request.ask import Ask
from penstock.kv.hint import ReturnHint

_MOST_LISTED = 50


class Models:
    """A completer for each model. The first one is meant where a request need not name any."""

    def __init__(self, completers: Sequence[Completer]) -> None:
        self.first = completers[0]
        self._by_name = {completer.name: completer for completer in completers}

    def __iter__(self) -> Iterator[Completer]:
        return iter(self._by_name.values())

    def of(self, name: str | None) -> Completer:
        """The model of a request, MODEL or MODEL:ADAPTER. Raises NotFound for one that is not served here."""
        found = self._by_name.get(name) if name else self.first
        if found is not None:
            return found
        base = self._by_name.get(str(name).rpartition(":")[0])
        if base is not None and base.has(str(name)):
            return base.adapted(str(name))
        there = ", ".join(repr(completer.name) for completer in islice(self.every(), _MOST_LISTED))
        what = f"the model {(name or '')[:100]!r} does not exist; there is {there}"
        raise NotFound(what, field="model", code="model_not_found")

    def every(self) -> Iterator[Completer]:
        """All models, and behind each the same with its adapters."""
        for completer in self:
            yield completer
            yield from map(completer.adapted, completer.adapters)

    def open(self, ask: Ask, caller: Caller) -> AbstractAsyncContextManager[Completion]:
        """See `Completer.open`; raises NotFound as well."""
        return self.of(ask.model).open(ask, caller)

    async def hint(self, session: str, hint: ReturnHint) -> None:
        """See `Completer.hint`: sessions are known to the whole mesh, whichever model they use."""
        await self.first.hint(session, hint)

    def give_up(self, error: PenstockError) -> None:
        """Ends all running completions with `error`."""
        for completer in self:
            completer.give_up(error)

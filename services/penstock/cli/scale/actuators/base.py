"""What an actuator does."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from penstock.cli.scale.state import WorkRole


class ActuatorFailed(Exception):
    """It could not be done; the text says why. Asked again, it is done once."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker of the mesh."""

    id: str
    """Of this start of its process."""
    address: str
    """host:port."""


class Actuator(Protocol):
    """Starts and ends workers."""

    @property
    def adds(self) -> bool:
        """Whether it can start any."""
        ...

    def removes(self, worker: WorkerPlace) -> bool:
        """Whether it can end that one."""
        ...

    async def add(self, role: WorkRole) -> None:
        """Orders one more; it joins the router when it is ready. Raises ActuatorFailed."""
        ...

    async def remove(self, worker: WorkerPlace) -> None:
        """Ends one that is drained. Raises ActuatorFailed."""
        ...

    async def give_up(self, role: WorkRole, joined: Set[str]) -> None:
        """The oldest order of that role which has not come is not waited for any more; `joined`: addresses of the
        workers that are there. Who can ends it; else it counts as any other when it comes."""
        ...


class NoActuator:
    """Workers change their roles, and that is all."""

    adds = False

    def removes(self, worker: WorkerPlace) -> bool:
        """None."""
        return False

    async def add(self, role: WorkRole) -> None:
        """Never."""
        raise ActuatorFailed("--actuator is none")

    async def remove(self, worker: WorkerPlace) -> None:
        """Never."""
        raise ActuatorFailed("--actuator is none")

    async def give_up(self, role: WorkRole, joined: Set[str]) -> None:
        """There are no orders."""

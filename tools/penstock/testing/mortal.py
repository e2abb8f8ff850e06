"""A mesh of real processes under their supervisor, whose services can be killed, stopped and cut off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from penstock.cli.child import ChildSpec
from penstock.cli.mesh import MeshOptions, plan_mesh
from penstock.cli.ports import reserved_ports
from penstock.cli.running import serving
from penstock.cli.supervisor import ChildChange, ChildState, Patience, Supervisor, supervised
from penstock.testing.wires import CuttableWire, cuttable_wire

_HANDS_OFF = ("--local-prefill-tokens", "64")
"""Settings of a router with which prefill workers compute what prompts there are: else they die unemployed."""
_BACK_S = 60.0


class MortalMesh:
    """Made by `mortal_mesh`."""

    def __init__(
        self,
        url: str,
        supervisor: Supervisor,
        wires: Mapping[str, CuttableWire],
        doors: Mapping[str, CuttableWire],
        members: Mapping[str, str],
    ) -> None:
        self.url = url
        self.wires = wires
        """The way to the router of each service that was asked to have one of its own, by name."""
        self.doors = doors
        """The way of all others to each worker that was asked to have one, by name."""
        self.members = members
        """The names of the workers that have joined, such as decode-0, by their ids, which change when they start
        again. Only with the log level info."""
        self._supervisor = supervisor
        self._back: dict[str, asyncio.Event] = {}
        """Set when a service is ready whose process was sent a signal."""

    def heard(self, change: ChildChange) -> None:
        """A child's state has changed."""
        if change.state is ChildState.READY and change.name in self._back:
            self._back[change.name].set()

    def pid(self, name: str) -> int:
        """Of the process that runs a service, such as decode-0, now."""
        return self._supervisor.pids()[name]

    def send(self, name: str, number: signal.Signals) -> Callable[[], Awaitable[None]]:
        """Sends a signal to a service; what is returned waits until a successor of it is ready."""
        ready = self._back[name] = asyncio.Event()
        os.kill(self.pid(name), number)

        async def back() -> None:
            async with asyncio.timeout(_BACK_S):
                await ready.wait()

        return back


@asynccontextmanager
async def mortal_mesh(
    options: MeshOptions, *, patience: Patience | None = None, wired: Collection[str] = (), doors: Collection[str] = ()
) -> AsyncIterator[MortalMesh]:
    """A mesh that serves, for the length of the block. Who dies comes back after the same short pause each time.
    `wired` are services, such as decode-0, with a way to the router that can be cut; `doors` are workers that others
    reach on a way that can be cut."""
    patience = patience or Patience(stop_s=5.0, first_backoff_s=0.1, last_backoff_s=0.1, hung_s=options.hung_s)
    async with AsyncExitStack() as stack:
        plan = plan_mesh(options, stack.enter_context(reserved_ports()))
        children, wires, opened = list(plan.children), {}, {}
        for number, child in enumerate(children):
            if child.name.startswith("router"):
                children[number] = replace(child, command=(*child.command, *_HANDS_OFF))
            if child.name in wired:
                at = child.command.index("--router") + 1
                wires[child.name] = wire = await stack.enter_async_context(cuttable_wire(child.command[at]))
                child = children[number] = _replaced(child, at, wire.address)
            if child.name in doors:
                door = await stack.enter_async_context(cuttable_wire(_address(child)))
                opened[child.name] = door
                children[number] = replace(child, command=(*child.command, "--advertise", door.address))
        meshes: list[MortalMesh] = []

        def heard(change: ChildChange) -> None:
            for mesh in meshes:
                mesh.heard(change)

        names = {_address(child): child.name for child in children if "--address" in child.command}
        names |= {door.address: name for name, door in opened.items()}
        members: dict[str, str] = {}

        def said(name: str, line: str) -> None:
            if name.startswith("router") and '"member joined"' in line:
                joined = json.loads(line)
                if joined["at"] in names:
                    members[joined["member"]] = names[joined["at"]]

        supervisor = await stack.enter_async_context(supervised(children, heard, said, patience))
        await supervisor.ready()
        await serving(plan.url)
        meshes.append(MortalMesh(plan.url, supervisor, wires, opened, members))
        yield meshes[0]


def _address(child: ChildSpec) -> str:
    """At which it listens."""
    return child.command[child.command.index("--address") + 1]


def _replaced(child: ChildSpec, at: int, argument: str) -> ChildSpec:
    return replace(child, command=(*child.command[:at], argument, *child.command[at + 1 :]))

"""Checks of `penstock ctl doctor` that need no service: this host, and whether the answers of all agree."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.rpc.checkup import own_version
from penstock.runtime.findings import Finding, open_files, shared_memory
from penstock.v1 import router_pb2

CLOCK_S = 1.0
"""Most seconds by which clocks may differ, beyond what the way there and back takes."""
_HERE = "this host"


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the report."""

    where: str
    check: str
    ok: bool
    found: str
    advice: str = ""

    def plain(self) -> dict[str, Any]:
        """Its JSON."""
        return {
            "where": self.where,
            "check": self.check,
            "ok": self.ok,
            "found": self.found,
            "advice": "" if self.ok else self.advice,
        }


@dataclass(slots=True)
class CheckedService:
    """One service."""

    where: str
    """Its kind and address."""
    checks: list[Check] = field(default_factory=list)
    version: str = ""
    """Empty: it did not answer."""
    ahead_s: float = 0.0
    """By which its clock is ahead of this host's."""
    way_s: float = 0.0
    """Half the way there and back: as much may that be wrong."""
    found: router_pb2.MembersResponse | None = None
    """What a router knows."""

    def note(self, check: str, ok: bool, found: str, advice: str = "") -> None:
        """One more check."""
        self.checks.append(Check(self.where, check, ok, found, advice))


async def checked_host(*, kernels: bool) -> list[Check]:
    """This host: limits, shared memory, and the kernels for its processor."""
    looks = (open_files, shared_memory, *((kernels_found,) if kernels else ()))
    findings = [await asyncio.to_thread(look) for look in looks]
    return [Check(_HERE, one.check, one.ok, one.found, one.advice) for one in findings]


def kernels_found() -> Finding:
    """Whether the kernels are compiled for this processor; nothing is compiled here."""
    try:
        from penstock.engine.kernels.cpu.build import NotBuilt, instruction_sets, present
    except ImportError:
        return Finding("kernels", True, "torch is not installed: no worker runs here")
    try:
        path = present()
    except NotBuilt as error:
        return Finding("kernels", False, str(error), "workers here compute with torch alone, which is slower")
    isa = instruction_sets()[0]
    if path:
        return Finding("kernels", True, f"compiled for this processor ({isa})")
    right = (
        "run `python -m penstock.engine.kernels.cpu.build`, with g++ or clang++; else the first worker compiles them"
    )
    return Finding("kernels", False, f"not compiled yet for this processor ({isa})", right)


def checked_versions(visits: Sequence[CheckedService]) -> list[Check]:
    """Whether all run the same code."""
    by_version: dict[str, list[str]] = defaultdict(list)
    for visit in visits:
        if visit.version:
            by_version[visit.version].append(visit.where)
    if not by_version:
        return []
    if len(by_version) == 1:
        [version] = by_version
        here = own_version()
        found = f"all run {version}"
        if version != here:
            return [Check("mesh", "versions", True, f"{found}; this command is of {here}")]
        return [Check("mesh", "versions", True, found)]
    found = "; ".join(f"{version}: {', '.join(sorted(where))}" for version, where in sorted(by_version.items()))
    right = "bring all to one version: drain the others, and start them again with it"
    return [Check("mesh", "versions", False, found, right)]


def checked_clocks(visits: Sequence[CheckedService]) -> list[Check]:
    """Whether the clocks of all agree."""
    told = [(visit.ahead_s, visit.way_s, visit.where) for visit in visits if visit.version]
    if not told:
        return []
    least, most = min(told), max(told)
    apart, unsure = most[0] - least[0], least[1] + most[1]
    found = f"at most {apart:.3f} s apart, give or take {unsure:.3f} s"
    if apart <= CLOCK_S + unsure:
        return [Check("mesh", "clocks", True, found)]
    right = "let chrony or systemd-timesyncd set the clocks of both: promises on disks and leases in Redis go by them"
    return [Check("mesh", "clocks", False, f"{most[2]} is {apart:.3f} s ahead of {least[2]}", right)]

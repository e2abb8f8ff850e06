"""`penstock up` with fake services: `python fake_up.py BEHAVIOUR...`; the last service is a gateway."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from tests.services.cli.helpers import fake

from penstock.cli.mesh import MeshOptions, MeshPlan
from penstock.cli.ports import Ports
from penstock.cli.up import up


def plan(options: MeshOptions, ports: Ports) -> MeshPlan:
    address = ports.reserve()
    specs: list[Any] = [fake(f"child-{number}", behaviour) for number, behaviour in enumerate(sys.argv[1:])]
    specs.append(fake("gateway", f"gateway:{address.rpartition(':')[2]}"))
    return MeshPlan(f"http://{address}", tuple(specs))


if __name__ == "__main__":
    with mock.patch("penstock.cli.running.plan_mesh", plan):
        sys.exit(up(MeshOptions(port=0)))

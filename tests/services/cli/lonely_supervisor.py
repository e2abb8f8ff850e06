"""A supervisor to be killed: starts fake services with the given behaviours, and prints their pids as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from tests.services.cli.helpers import fake

from penstock.cli.supervisor import supervised


async def main() -> None:
    specs = [fake(f"child-{number}", behaviour) for number, behaviour in enumerate(sys.argv[1:])]
    async with supervised(specs, lambda _change: None, lambda _name, _line: None) as supervisor:
        await supervisor.ready()
        print(json.dumps(supervisor.pids()), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

"""`python -m penstock.router`"""

from __future__ import annotations

from functools import partial

from penstock.router.config import RouterConfig
from penstock.router.service import open_router
from penstock.runtime.config import service_app
from penstock.runtime.lifecycle import Lifecycle, run
from penstock.runtime.telemetry import telemetry


def serve(config: RouterConfig) -> None:
    """The router: decides where requests go."""
    with telemetry("router", config.log_level):
        run(partial(_serve, config))


async def _serve(config: RouterConfig, lifecycle: Lifecycle) -> None:
    async with open_router(config) as router:
        lifecycle.ready(address=router.address)
        await lifecycle.stopped()


def main() -> None:
    """The command line."""
    service_app("router", serve, RouterConfig)()


if __name__ == "__main__":
    main()

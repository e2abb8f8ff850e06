"""`python -m penstock.gateway`"""

from __future__ import annotations

from functools import partial

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import open_gateway
from penstock.runtime.config import service_app
from penstock.runtime.lifecycle import Lifecycle, run
from penstock.runtime.telemetry import telemetry


def serve(config: GatewayConfig) -> None:
    """The gateway: OpenAI's HTTP API and gRPC in front of the mesh."""
    with telemetry("gateway", config.log_level):
        run(partial(_serve, config))


async def _serve(config: GatewayConfig, lifecycle: Lifecycle) -> None:
    async with open_gateway(config) as gateway:
        lifecycle.ready(address=gateway.address, grpc_address=gateway.grpc_address)
        await lifecycle.stopped()


app = service_app("gateway", serve, GatewayConfig)

if __name__ == "__main__":
    app()

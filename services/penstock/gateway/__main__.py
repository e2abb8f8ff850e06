"""`python -m penstock.gateway`."""

import gc

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway
from penstock.runtime.service import service_main

_COLLECT = (700, 3, 300)
"""Thresholds of Python's garbage collector. A collection holds the event loop, the longer the more it looks through. So
the second generation stays small; and the full collection, which walks over all live requests and finds little, is
rare."""


def _doors(gateway: Gateway) -> dict[str, str]:
    tls = {"tls": "yes"} if gateway.reception.config.tls_cert else {}
    return {"address": gateway.address, "grpc_address": gateway.grpc_address, **tls}


app = service_main(
    "gateway", "OpenAI's HTTP API and gRPC in front of the mesh.", GatewayConfig, open_gateway, tells=_doors
)

if __name__ == "__main__":
    gc.set_threshold(*_COLLECT)
    app()

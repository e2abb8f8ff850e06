"""`python -m penstock.gateway`."""

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway
from penstock.runtime.service import service_main


def _doors(gateway: Gateway) -> dict[str, str]:
    tls = {"tls": "yes"} if gateway.reception.config.tls_cert else {}
    return {"address": gateway.address, "grpc_address": gateway.grpc_address, **tls}


app = service_main(
    "gateway", "OpenAI's HTTP API and gRPC in front of the mesh.", GatewayConfig, open_gateway, tells=_doors
)

if __name__ == "__main__":
    app()

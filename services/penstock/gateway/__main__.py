"""`python -m penstock.gateway`."""

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import open_gateway
from penstock.runtime.service import service_main

app = service_main("gateway", "OpenAI's HTTP API and gRPC in front of the mesh.", GatewayConfig, open_gateway)

if __name__ == "__main__":
    app()

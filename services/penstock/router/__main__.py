"""`python -m penstock.router`."""

from penstock.router.config import RouterConfig
from penstock.router.service import open_router
from penstock.runtime.service import service_main

app = service_main("router", "Decides where requests go.", RouterConfig, open_router)

if __name__ == "__main__":
    app()

"""`python -m penstock.kvstore`."""

from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import open_kvstore
from penstock.runtime.service import service_main

app = service_main(
    "kvstore", "Keeps KV blocks in memory that the workers of this host share.", KvStoreConfig, open_kvstore
)

if __name__ == "__main__":
    app()

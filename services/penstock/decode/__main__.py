"""`python -m penstock.decode`."""

from penstock.decode.config import DecodeConfig
from penstock.decode.service import open_decode
from penstock.runtime.service import service_main

app = service_main(
    "decode",
    "Generates tokens with continuous batching.",
    DecodeConfig,
    open_decode,
    done=lambda worker: worker.done.wait(),
)

if __name__ == "__main__":
    app()

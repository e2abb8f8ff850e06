"""`python -m penstock.prefill`."""

from penstock.prefill.config import PrefillConfig
from penstock.prefill.service import open_prefill
from penstock.runtime.service import service_main

app = service_main(
    "prefill",
    "Computes the KV of prompts and samples first tokens.",
    PrefillConfig,
    open_prefill,
    done=lambda worker: worker.done.wait(),
)

if __name__ == "__main__":
    app()

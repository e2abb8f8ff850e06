"""vLLM's own server, in the place of this process."""

from __future__ import annotations

import json
import os
import sys

from loadtest.peers.cpu import torch_dtype
from loadtest.peers.servers.options import ServerOptions, read


def main(options: ServerOptions) -> None:
    """Becomes the server."""
    dtype = torch_dtype()
    shape = json.loads((options.model / "config.json").read_text())
    heads = shape["num_key_value_heads"] * shape["head_dim"]
    token = 2 * shape["num_hidden_layers"] * heads * (2 if dtype == "bfloat16" else 4)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-options.room * token // (1 << 30)))
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    command += ["--host", "127.0.0.1", "--port", str(options.port)]
    command += ["--served-model-name", options.model.name, "--dtype", dtype, "--max-model-len", str(options.tokens)]
    command += ["--max-num-seqs", str(options.streams), "--enable-prompt-tokens-details"]
    if options.lookup:
        ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
        command += ["--speculative-config", json.dumps(ngram)]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(read(__doc__))

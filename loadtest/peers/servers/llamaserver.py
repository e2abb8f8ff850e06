"""llama.cpp's own server, in the place of this process; converts the checkpoint first, where that has not been done."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from loadtest.peers.gguf_file import write
from loadtest.peers.servers.options import ServerOptions, read


def main(options: ServerOptions) -> None:
    """Becomes the server. Its slots share one cache of keys and values, so that a long prompt has room in it."""
    weights = options.model / "bfloat16.gguf"
    if not weights.exists():
        write(options.model, weights, "bfloat16")
    program = Path(sys.executable).with_name("llama-server")
    command = [str(program), "--model", str(weights), "--host", "127.0.0.1", "--port", str(options.port)]
    command += ["--threads", str(options.threads), "--parallel", str(options.streams)]
    command += ["--ctx-size", str(options.room), "--kv-unified", "--no-webui"]
    os.execv(program, command)


if __name__ == "__main__":
    main(read(__doc__))

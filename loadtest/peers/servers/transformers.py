"""transformers' `generate` behind as little of a server as can be, one request at a time; a thread generates.

With `--draft` it is assisted by a smaller model, with `--lookup` by what the prompt says.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loadtest.peers.cpu import torch_dtype
from loadtest.peers.servers.door import Told, serve_door
from loadtest.peers.servers.options import ServerOptions, read

_LOOKED_UP = 10
"""Tokens that are looked up at once: the value of its documentation."""


class Telling:
    """A streamer that tells what each step gave. The prompt comes first, and is not told."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self._told(value.reshape(-1).tolist())
        self._begun = True

    def end(self) -> None:
        pass


class Generating:
    """The models, and the thread that uses them."""

    def __init__(self, options: ServerOptions) -> None:
        torch.set_num_threads(options.threads)
        self._model = _loaded(str(options.model))
        self._further: dict[str, Any] = {}
        if options.draft is not None:
            self._further["assistant_model"] = _loaded(str(options.draft))
        if options.lookup:
            self._further["prompt_lookup_num_tokens"] = _LOOKED_UP
        self._line: queue.Queue[tuple[Sequence[int], int, Told]] = queue.Queue()
        threading.Thread(target=self._run, name="generate", daemon=True).start()

    def add(self, prompt: Sequence[int], tokens: int, told: Told) -> None:
        """In the order of the calls."""
        self._line.put((prompt, tokens, told))

    def _run(self) -> None:
        while True:
            prompt, tokens, told = self._line.get()
            with torch.inference_mode():
                self._model.generate(
                    torch.tensor([list(prompt)]),
                    min_new_tokens=tokens,
                    max_new_tokens=tokens,
                    do_sample=False,
                    streamer=Telling(told),
                    **self._further,
                )
            told(())


def _loaded(checkpoint: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, torch_dtype())).eval()


def main(options: ServerOptions) -> None:
    """Serves until it is ended."""
    asyncio.run(serve_door(Generating(options), options.model, options.port))


if __name__ == "__main__":
    main(read(__doc__))

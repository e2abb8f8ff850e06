"""llama.cpp through the C API that llama-cpp-python wraps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np

from loadtest.peers.protocol import serve

_ROWS, _CHUNK = 2048, 512
"""Rows of a call, and of what is computed at once: llama.cpp's own defaults."""


class LlamaCpp:
    """A model, and a context at a time. Every sequence has a KV cache of its own, as with llama-server's slots."""

    def prepare(self, checkpoint: Path, kind: str) -> None:
        from loadtest.peers.gguf_file import write

        if not _file(checkpoint, kind).exists():
            write(checkpoint, _file(checkpoint, kind), kind)

    def load(self, checkpoint: Path, kind: str, *, threads: int, streams: int, tokens: int, room: int) -> None:
        api.llama_backend_init()
        wanted = api.llama_model_default_params()
        if kind == "int8" and "amx_int8" in Path("/proc/cpuinfo").read_text():
            wanted.use_extra_bufts = False  # its AMX products end the process when gcc 12 has compiled them
        self._model: Any = api.llama_model_load_from_file(str(_file(checkpoint, kind)).encode(), wanted)
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {_file(checkpoint, kind)}")
        self._vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._batch = api.llama_batch_init(_ROWS, 0, 1)
        self._threads = threads
        self._context: Any = None
        self._sizes = 0, 0
        self._known: list[tuple[int, ...]] = []

    def prefill(self, prompt: Sequence[int]) -> float:
        self._open(1, len(prompt))
        self._forget()
        begin = time.perf_counter()
        self._compute(0, prompt)
        return time.perf_counter() - begin

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        wanted = [tuple(prompt) for prompt in prompts]
        self._open(len(wanted), len(wanted[0]) + steps)
        if self._known != wanted:
            self._forget()
            for number, prompt in enumerate(wanted):
                self._compute(number, prompt[:-1])
            self._known = wanted
        lengths = [len(prompt) - 1 for prompt in wanted]
        for number, length in enumerate(lengths):
            api.llama_memory_seq_rm(self._memory, number, length, -1)
        tokens = [prompt[-1] for prompt in wanted]
        begin = 0.0
        for step in range(steps + 1):
            tokens = self._step(tokens, [length + step for length in lengths])
            begin = begin or time.perf_counter()
        return time.perf_counter() - begin

    def _open(self, streams: int, tokens: int) -> None:
        """A context for so many sequences of so many tokens, unless there is one."""
        if self._sizes[0] == streams and self._sizes[1] >= tokens:
            return
        if self._context:
            api.llama_free(self._context)
        self._sizes = streams, -(-(tokens + 1) // 256) * 256
        wanted = api.llama_context_default_params()
        wanted.n_ctx = streams * self._sizes[1]
        wanted.n_batch, wanted.n_ubatch = _ROWS, _CHUNK
        wanted.n_seq_max = streams
        wanted.n_threads = wanted.n_threads_batch = self._threads
        wanted.kv_unified = False
        self._context = api.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise RuntimeError(f"llama.cpp can't make a context of {wanted.n_ctx} tokens")
        self._memory: Any = api.llama_get_memory(self._context)
        self._known = []

    def _forget(self) -> None:
        api.llama_memory_clear(self._memory, False)
        self._known = []

    def _compute(self, sequence: int, prompt: Sequence[int]) -> int:
        """A whole prompt; the token that follows."""
        for first in range(0, len(prompt), _ROWS):
            piece = prompt[first : first + _ROWS]
            last = first + len(piece) == len(prompt)
            self._run([(token, first + at, sequence) for at, token in enumerate(piece)], last)
        return self._chosen(-1)

    def _step(self, tokens: Sequence[int], places: Sequence[int]) -> list[int]:
        """One token of every sequence."""
        rows = [(token, place, number) for number, (token, place) in enumerate(zip(tokens, places, strict=True))]
        self._run(rows, True, every=True)
        return [self._chosen(row) for row in range(len(rows))]

    def _run(self, rows: Sequence[tuple[int, int, int]], last: bool, every: bool = False) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, place, sequence) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, place
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = every or (last and at == len(rows) - 1)
        failed = api.llama_decode(self._context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def _chosen(self, row: int) -> int:
        """The most probable token. The first look waits for the computation."""
        logits = api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


def _file(checkpoint: Path, kind: str) -> Path:
    return checkpoint / f"{kind}.gguf"


if __name__ == "__main__":
    serve(LlamaCpp())

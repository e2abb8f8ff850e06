"""OpenVINO GenAI: its pipeline with continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.peers.protocol import serve
from loadtest.peers.window import Window

_SPARE = 64
"""Tokens for streams that begin before the last does."""


class OpenVino:
    """The pipeline, stepped by hand. Prefix caching keeps the prompts of a batch for the next time."""

    def prepare(self, checkpoint: Path, kind: str) -> None:
        from optimum.exporters.openvino import main_export

        if not (_directory(checkpoint) / "openvino_model.bin").exists():
            main_export(str(checkpoint), _directory(checkpoint), task="text-generation-with-past")

    def load(self, checkpoint: Path, kind: str, *, threads: int, streams: int, tokens: int, room: int) -> None:
        import openvino
        import openvino_genai as genai

        cache = genai.SchedulerConfig()
        cache.num_kv_blocks = (room + streams * _SPARE) // 32 + 2 * streams
        cache.max_num_batched_tokens = 512
        cache.max_num_seqs = streams
        cache.enable_prefix_caching = True
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._openvino, self._genai = openvino, genai
        self._pipeline: Any = genai.ContinuousBatchingPipeline(str(_directory(checkpoint)), cache, "CPU", settings)
        self._asked = 0

    def prefill(self, prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        handle = self._ask(prompt, 1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - begin
        handle.read_all()
        return seconds

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        handles = {str(at): self._ask(prompt, steps + _SPARE) for at, prompt in enumerate(prompts)}
        counts = dict.fromkeys(handles, 0)
        window = Window(list(handles), steps)
        while not window.over:
            self._pipeline.step()
            for name, handle in handles.items():
                while handle.can_read():
                    counts[name] += sum(len(output.generated_ids) for output in handle.read().values())
                window.reached(name, counts[name])
            window.step_over(time.perf_counter())
        for handle in handles.values():
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return window.seconds

    def _ask(self, prompt: Sequence[int], tokens: int) -> Any:
        self._asked += 1
        wanted = self._genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = tokens, True, False
        ids = self._openvino.Tensor(self._array(prompt))
        return self._pipeline.add_request(self._asked, ids, wanted)

    def _array(self, prompt: Sequence[int]) -> Any:
        import numpy as np

        return np.array([list(prompt)], dtype=np.int64)


def _directory(checkpoint: Path) -> Path:
    return checkpoint / "openvino"


if __name__ == "__main__":
    serve(OpenVino())

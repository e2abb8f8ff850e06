"""OpenVINO GenAI behind as little of a server as can be. A thread steps the pipeline while there is work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from loadtest.peers.servers.door import Told, serve_door
from loadtest.peers.servers.options import ServerOptions, read

_BLOCK = 32
"""Tokens of a block of the CPU plugin's cache."""


@dataclass(slots=True)
class Running:
    """One request in the pipeline."""

    handle: Any
    told: Told


class Pipeline:
    """The pipeline with continuous batching and prefix caching, stepped by a thread of its own."""

    def __init__(self, options: ServerOptions) -> None:
        cache = genai.SchedulerConfig()
        cache.num_kv_blocks = options.room // _BLOCK
        cache.max_num_seqs = options.streams
        cache.enable_prefix_caching = True
        settings = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "bf16"}
        directory = converted(options.model)
        self._pipeline: Any = genai.ContinuousBatchingPipeline(str(directory), cache, "CPU", settings)
        self._asked = 0
        self._new: list[tuple[Sequence[int], int, Told]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def add(self, prompt: Sequence[int], tokens: int, told: Told) -> None:
        """Starts a request for exactly `tokens` greedy tokens; `told` is called in the thread of the steps."""
        with self._changed:
            self._new.append((prompt, tokens, told))
            self._changed.notify()

    def _run(self) -> None:
        running: list[Running] = []
        while True:
            with self._changed:
                while not self._new and not running:
                    self._changed.wait()
                new, self._new = self._new, []
            running += [Running(self._started(prompt, tokens), told) for prompt, tokens, told in new]
            self._pipeline.step()
            running = [one for one in running if not self._told(one)]

    def _started(self, prompt: Sequence[int], tokens: int) -> Any:
        self._asked += 1
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = tokens, True, False
        ids = openvino.Tensor(np.array([list(prompt)], dtype=np.int64))
        return self._pipeline.add_request(self._asked, ids, wanted)

    def _told(self, one: Running) -> bool:
        """Tells what the step gave; whether the request has ended."""
        while one.handle.can_read():
            for output in one.handle.read().values():
                one.told(list(output.generated_ids))
        ended = bool(one.handle.get_status() != genai.GenerationStatus.RUNNING)
        if ended:
            one.told(())
        return ended


def converted(checkpoint: Path) -> Path:
    """The model in OpenVINO's form, beside the checkpoint; made when it is missing."""
    directory = checkpoint / "openvino"
    if not (directory / "openvino_model.bin").exists():
        from optimum.exporters.openvino import main_export

        main_export(str(checkpoint), directory, task="text-generation-with-past")
    return directory


def main(options: ServerOptions) -> None:
    """Serves until it is ended."""
    asyncio.run(serve_door(Pipeline(options), options.model, options.port))


if __name__ == "__main__":
    main(read(__doc__))

"""What tests of pictures in the engine share: prompts with pictures, and answers of transformers."""

from __future__ import annotations

import numpy as np
import torch
from tests.libs.engine.test_families import logits_of, run_of, tables

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.request import Request, SamplingParams
from penstock.engine.step.pictures import PictureRows
from penstock.kv.identity import Chain
from penstock.pictures.picture import Grid, ShownPicture, picture_of, spans


class SeeingModel:
    """A model of transformers that sees pictures, whose checkpoint is in `directory`."""

    def logits(self, tokens, pictures):
        """Of all positions."""
        raise NotImplementedError

    def greedy(self, tokens, pictures, count):
        """So many tokens behind a prompt."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, pictures)[-1].argmax()))
        return tokens[-count:]


def whole(seed, rows, columns, side):
    """A picture of noise in cells, which is not cut."""
    shape = (1, rows * side, columns * side, 3)
    return picture_of(Grid(rows, columns), side, np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def prompt_of(parts, tokens_of):
    """Of numbers of ordinary tokens, and pictures, whose tokens are `tokens_of(grid)`: the tokens, and where the
    pictures are."""
    tokens, shown = [], []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            tokens += torch.randint(0, 240, (part,), generator=torch.Generator().manual_seed(number)).tolist()
        else:
            own = tokens_of(part.grid)
            shown.append(ShownPicture(part, len(tokens), len(own)))
            tokens += own
    return tokens, tuple(shown)


def logits_in_chunks(seeing, tokens, shown, chunk):
    """Of all positions, computed so many at a time; and how many tiles that took."""
    runner = Runner(inspect(seeing.directory), EngineConfig(seeing.directory, dtype="float32", kv_pool_tokens=1600))
    rows, pages = PictureRows(shown, tokens, seeing.form), tables([len(tokens)])[0]
    found = []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        run = run_of(tokens[: start + 1], start, 1, pages, tokens[start + 1 : end])
        run.pictures = rows
        found.append(logits_of(runner, [run]))
    return torch.cat(found), runner.shown.computed


def engine_config(seeing):
    """Of an engine that computes prompts in small chunks."""
    return EngineConfig(
        seeing.directory, dtype="float32", kv_pool_tokens=2048, max_batch_tokens=40, max_running=4, threads=1
    )


async def asked(engine, kit, seeing, id, prompt, *, count=4):
    """Tokens of a prompt with pictures that were there already; the answer is what transformers says."""
    tokens, shown = prompt
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0)
    chain = Chain(b"r" * 32, 16, tokens, pictures=spans(shown))
    answer = await kit.read(engine, Request(id, tuple(tokens), params, pictures=shown), chain=chain)
    assert answer.ids == seeing.greedy(tokens, [one.picture for one in shown], count)
    return answer.last.shared_tokens

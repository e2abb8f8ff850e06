"""On a GPU pictures are what they are on the CPU: embeddings of tiles, and steps with rows of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.pictures import PictureRows
from penstock.engine.step.run import Run
from penstock.pictures.picture import Grid, ShownPicture, picture_of
from penstock.pictures.tiles import TEXTS, tokens_of
from penstock.testing.seeing import write_seeing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def steps(directory, device, dtype):
    """Logits behind a prompt with a picture, in chunks, and of the token behind it."""
    checkpoint = inspect(directory)
    form = checkpoint.pictures.form
    ids = {name: form.token - list(TEXTS).index("patch") + at for at, name in enumerate(TEXTS)}
    pixels = np.random.default_rng(3).integers(0, 256, (3, form.tile, form.tile, 3), np.uint8)
    own = tokens_of(Grid(1, 2), form, ids)
    tokens = [*range(40), *own, *range(50, 90)]
    rows = PictureRows([ShownPicture(picture_of(Grid(1, 2), form.tile, pixels), 40, len(own))], tokens, form)
    runner = Runner(checkpoint, EngineConfig(model=directory, dtype=dtype, device=device, kv_pool_tokens=640))
    params, found = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20), []
    for start in range(0, len(tokens), 32):
        choice = Choice(params, frozenset(), tokens, len(tokens))
        run = Run(choice, start, min(32, len(tokens) - start), list(range(1, 15)), ("one", 0), pictures=rows)
        [answer] = runner.step([run])
        found += answer
    [chosen] = found
    return chosen.token, [logprob for _, logprob in chosen.top], runner.shown.computed


def test_same_answers_as_on_the_cpu(tmp_path):
    directory = write_seeing(tmp_path / "model")
    token, logprobs, tiles = steps(directory, "cuda", "float32")
    wanted, close, _ = steps(directory, "cpu", "float32")
    assert token == wanted and tiles == 3
    assert logprobs == pytest.approx(close, abs=1e-3)
    assert np.isfinite(steps(directory, "cuda", "bfloat16")[1]).all()

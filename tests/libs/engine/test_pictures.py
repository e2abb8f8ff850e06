"""Pictures in the engine against transformers: Llama 4, all positions, in chunks, from pages, and told apart."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import transformers
from tests.libs.engine.seeing import SeeingModel, asked, engine_config, logits_in_chunks, prompt_of
from tests.libs.engine.test_families import LLAMA_4, SIZES, close, run_of, tables

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import RequestRefused
from penstock.engine.pictures.tile_tower import TileTower
from penstock.engine.pictures.tower import embeddings
from penstock.engine.request import Request, SamplingParams
from penstock.engine.stats import Counters
from penstock.engine.step.pictures import PictureRows
from penstock.pictures.picture import Grid, ShownPicture, picture_of
from penstock.pictures.tiles import tokens_of
from penstock.testing.checkpoints import write_tokenizer

IDS = {"begin": 240, "end": 241, "whole": 242, "patch": 243, "across": 244, "down": 245}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 7,
    "vision_output_dim": 24,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)


class Seeing(SeeingModel):
    """A checkpoint of a random Llama 4 that transformers drew, and the model itself."""

    def __init__(self, directory, **vision):
        self.directory = directory
        torch.manual_seed(5)
        text = transformers.Llama4TextConfig(**{**SIZES, **LLAMA_4})
        config = transformers.Llama4Config(
            text_config=text, vision_config={**VISION, **vision}, image_token_index=IDS["patch"]
        )
        config._attn_implementation = text._attn_implementation = "eager"
        config.initializer_range = config.vision_config.initializer_range = 0.2
        self.model = transformers.Llama4ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "norm" in name or name.endswith(".bias"):
                    weight += torch.randn_like(weight) / 5
        self.model.save_pretrained(directory)
        write_tokenizer(directory / "tokenizer.json")
        self.form = inspect(directory).pictures.form

    def pixel_values(self, pictures):
        tiles = np.concatenate([picture.pixels for picture in pictures])
        levels = torch.from_numpy(tiles).permute(0, 3, 1, 2).to(torch.bfloat16) * (1 / 255)
        return ((levels - 0.5) / 0.5).float()

    def logits(self, tokens, pictures):
        with torch.inference_mode():
            answer = self.model(torch.tensor([tokens]), pixel_values=self.pixel_values(pictures), use_cache=False)
        return answer.logits[0].float()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Seeing(tmp_path_factory.mktemp("llama4"))


ONE = Grid(1, 1)


def drawn(seed, grid=ONE, side=56):
    tiles = grid.rows * grid.columns
    shape = (tiles + (tiles > 1), side, side, 3)
    return picture_of(grid, side, np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def prompt(form, *parts):
    return prompt_of(parts, lambda grid: tokens_of(grid, form, IDS))


def test_the_embeddings_of_tiles(seeing):
    tower = TileTower(inspect(seeing.directory).pictures, torch.float32, torch.device("cpu"))
    picture = drawn(1, Grid(2, 1))
    with torch.inference_mode():
        seen = seeing.model.get_image_features(seeing.pixel_values([picture])).last_hidden_state
        wanted = seeing.model.multi_modal_projector(seen)
    assert wanted.shape == (3, seeing.form.embeddings(2, 1), SIZES["hidden_size"])
    close(embeddings(tower, picture.pixels), wanted, atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_every_logit_in_chunks_of_any_size(seeing, chunk):
    one, other = drawn(1), drawn(2, Grid(2, 2))
    tokens, shown = prompt(seeing.form, 9, one, 5, other, 12)
    wanted = seeing.logits(tokens, [one, other])
    plain = seeing.model(torch.tensor([tokens]), use_cache=False).logits[0].detach()
    assert (wanted - plain).abs().max() > 0.1, "they make a difference"
    found, computed = logits_in_chunks(seeing, tokens, shown, chunk)
    close(found, wanted)
    assert computed == 1 + 5, "each tile once"


def request(id, tokens, shown):
    return Request(id, tuple(tokens), GREEDY, pictures=shown)


async def test_the_same_picture_is_found_and_another_one_is_not(seeing, kit):
    one, other = (prompt(seeing.form, 20, drawn(seed), 30) for seed in (1, 2))
    whole = (len(one[0]) - 1) // 16 * 16
    async with Engine.open(engine_config(seeing)) as engine:
        assert await asked(engine, kit, seeing, "first", one) == 0
        assert await asked(engine, kit, seeing, "again", one) >= whole
        assert await asked(engine, kit, seeing, "another", other) == 16, "the block before it"
        assert await asked(engine, kit, seeing, "another again", other) >= whole
        assert engine.shown.computed == 2, "what is in pages needs no embeddings"


async def test_a_picture_stands_where_its_tokens_are(seeing, kit):
    one = drawn(1)
    tokens, shown = prompt(seeing.form, 4, one, 4)
    config = EngineConfig(seeing.directory, dtype="float32", kv_pool_tokens=512, threads=1)
    async with Engine.open(config) as engine:
        for wrong, says in (
            ([ShownPicture(one, 4, 3)], "1 tiles of 16 embeddings, and the prompt 1 places for them"),
            ([ShownPicture(one, 4, 500)], "has no place of its own in the prompt"),
            ([*shown, *shown], r"pictures\[1\] has no place of its own"),
            ([ShownPicture(drawn(1, side=28), 4, 19)], "is not in cells of 56 pixels"),
        ):
            with pytest.raises(RequestRefused, match=says):
                await kit.read(engine, request("wrong", tokens, tuple(wrong)))


async def test_a_model_of_texts_sees_none(tiny, kit):
    async with Engine.open(EngineConfig(tiny, threads=1)) as engine:
        with pytest.raises(RequestRefused, match="can't be shown to this model here: this is a model of texts"):
            await kit.read(engine, request("r", [1, 2, 3], (ShownPicture(drawn(1), 0, 1),)))


def test_a_step_that_shows_pictures_says_nothing_of_texts(seeing):
    """Torch computes it, whatever computes texts."""
    tokens, shown = prompt(seeing.form, 9, drawn(1), 12)
    run = run_of(tokens, 0, len(tokens), tables([len(tokens)])[0])
    counters = Counters()
    counters.step(2.0, len(tokens), len(tokens), [run])
    rate = counters.prefill_tokens_per_s
    run.pictures = PictureRows(shown, tokens, seeing.form)
    counters.step(20.0, len(tokens), len(tokens), [run])
    assert counters.prefill_tokens_per_s == rate

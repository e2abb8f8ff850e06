"""Pictures of Kimi K2.5 in the engine against transformers: embeddings, all positions in chunks, and decoded."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.libs.engine.seeing import SeeingModel, asked, engine_config, logits_in_chunks, prompt_of, whole
from tests.libs.engine.test_families import LATENT, SIZES, close

from penstock.checkpoint import inspect
from penstock.engine.engine import Engine
from penstock.engine.pictures import weights
from penstock.engine.pictures.padded_tower import PaddedTower
from penstock.engine.pictures.tower import embeddings
from penstock.testing.checkpoints import write_tokenizer

IMAGE, SIDE, PATCH, HEADS = 240, 14, 7, 2
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "patch_size": PATCH,
    "pos_emb_height": 5,
    "pos_emb_width": 5,
    "rope_parameters": None,
}
NAMES = {
    "patch_embed.pos_emb.position_embeddings": "patch_embed.pos_emb.weight",
    "final_layernorm": "encoder.final_layernorm",
    ".norm1.": ".norm0.",
    ".norm2.": ".norm1.",
    ".mlp.fc1.": ".mlp.fc0.",
    ".mlp.fc2.": ".mlp.fc1.",
    ".attn.proj.": ".wo.",
    "mm_projector.in_proj": "mm_projector.proj.0",
    "mm_projector.out_proj": "mm_projector.proj.2",
}
"""Of transformers, and in published files."""


def published(state):
    """The picture part as published files have it: q, k and v in one, and side by side what turns together."""
    found = {}
    for name, tensor in state.items():
        if "vision_tower" not in name and "mm_projector" not in name:
            continue
        name = name.removeprefix("model.").replace("vision_tower.layers.", "vision_tower.encoder.blocks.")
        ours = next((theirs for theirs in NAMES if theirs in name), None)
        found[name if ours is None else name.replace(ours, NAMES[ours])] = tensor
    for name in [name for name in found if ".attn.q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        turned = [part.view(HEADS, 2, -1, *part.shape[1:]).transpose(1, 2).reshape(part.shape) for part in parts[:2]]
        found[name.replace(".attn.q_proj.", ".wqkv.")] = torch.cat([*turned, parts[2]])
    return {name: tensor.contiguous() for name, tensor in found.items()}


class Seeing(SeeingModel):
    """A checkpoint of a random Kimi K2.5 that transformers drew, and the model itself."""

    def __init__(self, directory):
        self.directory = directory
        torch.manual_seed(5)
        text = transformers.DeepseekV3Config(**{**SIZES, **LATENT})
        config = transformers.Kimi_K25Config(
            text_config=text,
            vision_config=VISION,
            projection_hidden_size=VISION["hidden_size"],
            image_token_id=IMAGE,
            tie_word_embeddings=False,
        )
        config._attn_implementation = "eager"
        config.initializer_range = config.vision_config.initializer_range = 0.2
        self.model = transformers.Kimi_K25ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "norm" in name or name.endswith(".bias"):
                    weight += torch.randn_like(weight) / 5
                if "position_embeddings" in name:
                    weight.copy_(torch.randn_like(weight) / 2)
        self.model.save_pretrained(directory)
        file = directory / "model.safetensors"
        texts = {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
            for name, tensor in load_file(file).items()
            if "vision_tower" not in name and "mm_projector" not in name
        }
        save_file({**texts, **published(self.model.state_dict())}, file, metadata={"format": "pt"})
        write_tokenizer(directory / "tokenizer.json")
        (directory / "preprocessor_config.json").write_text('{"patch_size": 7, "max_patches": 120}')
        self.form = inspect(directory).pictures.form

    def shown(self, pictures):
        """As transformers takes them."""
        patches = []
        for one in pictures:
            levels = (torch.from_numpy(one.pixels[0]).float() / 255 - 0.5) / 0.5
            rows, columns = 2 * one.grid.rows, 2 * one.grid.columns
            patches.append(
                levels.view(rows, PATCH, columns, PATCH, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, PATCH, PATCH)
            )
        grids = torch.tensor([[1, 2 * one.grid.rows, 2 * one.grid.columns] for one in pictures])
        return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}

    def logits(self, tokens, pictures):
        with torch.inference_mode():
            answer = self.model(torch.tensor([tokens]), **self.shown(pictures), use_cache=False)
        return answer.logits[0].float()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Seeing(tmp_path_factory.mktemp("kimi"))


def drawn(seed, rows, columns):
    return whole(seed, rows, columns, SIDE)


def prompt(*parts):
    return prompt_of(parts, lambda grid: [IMAGE] * (grid.rows * grid.columns))


@pytest.mark.parametrize("parts", ["large", "small"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (5, 2)])
def test_the_embeddings_of_a_picture(seeing, rows, columns, parts, monkeypatch):
    """Of grids that are smaller and larger than that of the learned positions."""
    if parts == "small":
        monkeypatch.setattr(weights, "_PRODUCTS", 3 * VISION["hidden_size"] ** 2)
        monkeypatch.setattr(weights, "_SCORES", 40)
    tower = PaddedTower(inspect(seeing.directory).pictures, torch.float32, torch.device("cpu"))
    picture = drawn(1, rows, columns)
    with torch.inference_mode():
        [wanted] = seeing.model.get_image_features(**seeing.shown([picture])).pooler_output
    assert wanted.shape == (rows * columns, SIZES["hidden_size"])
    close(embeddings(tower, picture.pixels)[0], wanted, atol=1e-5)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_every_logit_in_chunks_of_any_size(seeing, chunk):
    one, other = drawn(1, 4, 3), drawn(2, 3, 2)
    tokens, shown = prompt(9, one, 5, other, 40)
    wanted = seeing.logits(tokens, [one, other])
    assert (wanted - seeing.logits(tokens, [drawn(3, 4, 3), other])).abs().max() > 0.1, "they make a difference"
    found, computed = logits_in_chunks(seeing, tokens, shown, chunk)
    close(found, wanted)
    assert computed == 2, "each picture once"


async def test_answers_are_those_of_transformers_and_the_same_picture_is_found(seeing, kit):
    one, other, turned = drawn(1, 4, 6), drawn(2, 4, 6), drawn(1, 6, 4)
    async with Engine.open(engine_config(seeing)) as engine:
        ask = partial(asked, engine, kit, seeing, count=6)
        assert await ask("first", prompt(20, one, 30)) == 0
        assert await ask("again", prompt(20, one, 30)) >= 64
        assert await ask("another", prompt(20, other, 30)) == 16, "the block before it"
        assert await ask("in another shape", prompt(20, turned, 30)) == 16
        assert engine.shown.computed == 3, "what is in pages needs no embeddings"

"""Pictures of Qwen2.5-VL in the engine against transformers: embeddings, all positions, in chunks, and decoded."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import transformers
from tests.libs.engine.seeing import SeeingModel, asked, engine_config, logits_in_chunks, prompt_of, whole
from tests.libs.engine.test_families import SIZES, close

from penstock.checkpoint import inspect
from penstock.engine.engine import Engine
from penstock.engine.errors import RequestRefused
from penstock.engine.pictures import weights
from penstock.engine.pictures.patch_tower import PatchTower, windows_of
from penstock.engine.pictures.tower import embeddings
from penstock.engine.step.pictures import PictureRows
from penstock.pictures.picture import ShownPicture
from penstock.testing.checkpoints import write_tokenizer

IMAGE, SIDE = 240, 14
VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 7,
    "window_size": 28,
    "out_hidden_size": SIZES["hidden_size"],
    "fullatt_block_indexes": [1],
}
TEXT = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}


class Seeing(SeeingModel):
    """A checkpoint of a random Qwen2.5-VL that transformers drew, and the model itself."""

    def __init__(self, directory):
        self.directory = directory
        torch.manual_seed(5)
        config = transformers.Qwen2_5_VLConfig(
            text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, vision_start_token_id=241
        )
        config._attn_implementation = "eager"
        config.initializer_range = 0.2
        config.text_config.initializer_range = config.vision_config.initializer_range = 0.2
        self.model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "norm" in name or "ln_q" in name or name.endswith(".bias"):
                    weight += torch.randn_like(weight) / 5
        self.model.save_pretrained(directory)
        write_tokenizer(directory / "tokenizer.json")
        (directory / "preprocessor_config.json").write_text(
            '{"patch_size": 7, "min_pixels": 196, "max_pixels": 19600, "image_mean": [0.5, 0.4, 0.3]}'
        )
        self.form = inspect(directory).pictures.form

    def shown(self, pictures):
        """As transformers takes them."""
        patches = []
        for one in pictures:
            levels = (torch.from_numpy(one.pixels[0]).float() / 255 - torch.tensor(self.form.mean)) / torch.tensor(
                self.form.deviation
            )
            rows, columns = one.grid
            parts = levels.view(rows, 2, 7, columns, 2, 7, 3).permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, 7, 7)
            patches.append(parts.expand(-1, -1, 2, -1, -1).reshape(len(parts), -1))
        grids = torch.tensor([[1, 2 * one.grid.rows, 2 * one.grid.columns] for one in pictures])
        return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}

    def logits(self, tokens, pictures):
        ids = torch.tensor([tokens])
        kinds = (ids == IMAGE).int()
        with torch.inference_mode():
            answer = self.model(ids, **self.shown(pictures), mm_token_type_ids=kinds, use_cache=False)
        return answer.logits[0].float()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Seeing(tmp_path_factory.mktemp("qwen"))


def drawn(seed, rows, columns):
    return whole(seed, rows, columns, SIDE)


def prompt(*parts):
    return prompt_of(parts, lambda grid: [IMAGE] * (grid.rows * grid.columns))


@pytest.mark.parametrize("parts", ["large", "small"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (4, 6), (5, 3), (1, 7)])
def test_the_embeddings_of_a_picture(seeing, rows, columns, parts, monkeypatch):
    """Of whole windows, cut ones, and one cell."""
    if parts == "small":
        monkeypatch.setattr(weights, "_PRODUCTS", 3 * VISION["hidden_size"] ** 2)
        monkeypatch.setattr(weights, "_SCORES", 40)
    tower = PatchTower(inspect(seeing.directory).pictures, torch.float32, torch.device("cpu"))
    picture = drawn(1, rows, columns)
    given = seeing.shown([picture])
    with torch.inference_mode():
        wanted = seeing.model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output
    assert wanted.shape == (rows * columns, SIZES["hidden_size"])
    close(embeddings(tower, picture.pixels)[0], wanted, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "side"), [(1, 1, 2), (4, 4, 2), (5, 7, 2), (3, 8, 4), (9, 9, 4)])
def test_windows_hold_each_cell_once(rows, columns, side):
    found = windows_of(rows, columns, side)
    assert sorted(found.order.tolist()) == list(range(rows * columns))
    wanted = {}
    for cell in range(rows * columns):
        wanted.setdefault((cell // columns // side, cell % columns // side), set()).add(cell)
    order, windows = iter(found.order.tolist()), []
    for count, size in found.sizes:
        windows += [{next(order) for _ in range(size)} for _ in range(count)]
    assert sorted(map(sorted, windows)) == sorted(map(sorted, wanted.values()))


@pytest.mark.parametrize("chunk", [5, 64, 1000])
def test_every_logit_in_chunks_of_any_size(seeing, chunk):
    one, other = drawn(1, 4, 6), drawn(2, 3, 2)
    tokens, shown = prompt(9, one, 5, other, 40)
    wanted = seeing.logits(tokens, [one, other])
    with torch.inference_mode():
        plain = seeing.model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (wanted - plain).abs().max() > 0.1, "they make a difference"
    found, computed = logits_in_chunks(seeing, tokens, shown, chunk)
    close(found, wanted)
    assert computed == 2, "each picture once"


def test_rows_are_turned_as_transformers_does(seeing):
    one, other = drawn(1, 4, 6), drawn(2, 3, 2)
    tokens, shown = prompt(9, one, 5, other, 12)
    ids, given = torch.tensor([tokens]), seeing.shown([one, other])
    wanted, _ = seeing.model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=given["image_grid_thw"]
    )
    rows = PictureRows(shown, tokens, seeing.form)
    assert rows.turned(0, len(tokens)).T.tolist() == wanted[:, 0].tolist()
    for start in range(len(tokens)):
        for end in (start, start + 1, min(start + 7, len(tokens))):
            assert rows.turned(start, end).tolist() == wanted[:, 0, start:end].T.tolist()


def test_a_picture_is_whole(seeing):
    one = drawn(1, 2, 2)
    tokens, shown = prompt(4, one, 4)
    tokens[5] = 7
    with pytest.raises(RequestRefused, match="has 1 tiles of 4 embeddings, and the prompt 3 places"):
        PictureRows(shown, tokens, seeing.form)
    apart = [IMAGE, 1, IMAGE, IMAGE, IMAGE]
    with pytest.raises(RequestRefused, match="has other tokens between its embeddings"):
        PictureRows([ShownPicture(one, 0, 5)], apart, seeing.form)


async def test_answers_are_those_of_transformers_and_the_same_picture_is_found(seeing, kit):
    one, other, turned = drawn(1, 4, 6), drawn(2, 4, 6), drawn(1, 6, 4)
    async with Engine.open(engine_config(seeing)) as engine:
        ask = partial(asked, engine, kit, seeing, count=6)
        assert await ask("first", prompt(20, one, 30)) == 0
        assert await ask("again", prompt(20, one, 30)) >= 64
        assert await ask("another", prompt(20, other, 30)) == 16, "the block before it"
        assert await ask("in another shape", prompt(20, turned, 30)) == 16
        assert engine.shown.computed == 3, "what is in pages needs no embeddings"

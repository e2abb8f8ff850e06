"""Pictures: our vision encoders beside those of transformers, on the same random weights; and in a whole mesh, what a
picture costs that was shown before, of what it costs the first time.

The encoders have six layers of about the width of the published models' and see one picture of 336 pixels along a side,
in float32 with two threads, in turns. The mesh is `penstock up` as it comes, with a model whose encoder is as large and
whose text part is tiny: so time to first token is the picture's. Each picture is noise that nobody has shown.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from penstock.bench.e2e.running import free_port, serving
from penstock.bench.e2e.servers import MeshForm, up
from penstock.bench.engine.rounds import THREADS
from penstock.bench.harness import Figure, figure, interleave
from penstock.checkpoint import PatchForm, inspect
from penstock.engine.pictures.tower import embeddings, tower_of
from penstock.testing.checkpoints import write_tokenizer
from penstock.testing.seeing import picture_url, write_seeing

_SIDE, _PATCH = 336, 14
_TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_TILES = {
    "hidden_size": 704,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "image_size": _SIDE,
    "patch_size": _PATCH,
    "vision_output_dim": 1024,
    "projector_input_dim": 1024,
    "projector_output_dim": 1024,
}
_CELLS = {
    "depth": 6,
    "hidden_size": 640,
    "intermediate_size": 1712,
    "num_heads": 8,
    "patch_size": _PATCH,
    "window_size": 112,
    "fullatt_block_indexes": [2, 5],
    "out_hidden_size": _TEXT["hidden_size"],
}
_GOAL = 1.0

Encode = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Encoders:
    """One picture through ours and through theirs."""

    ours: Encode
    theirs: Encode


async def picture_figures(quick: bool) -> Sequence[Figure]:
    """Runs the part."""
    torch.set_num_threads(THREADS)
    rounds, pictures = (2, 2) if quick else (9, 10)
    found: list[Figure] = []
    for name, made in (("tiles", tile_encoders), ("whole", cell_encoders)):
        with tempfile.TemporaryDirectory(prefix="penstock-pictures-") as place:
            found += await _beside_transformers(name, made(Path(place)), rounds)
    return [*found, *await _shown_again(pictures)]


async def _beside_transformers(name: str, encoders: Encoders, rounds: int) -> list[Figure]:
    torch.testing.assert_close(encoders.ours(), encoders.theirs(), atol=1e-3, rtol=1e-3)
    subjects: Mapping[str, Encode] = {"ours": encoders.ours, "theirs": encoders.theirs}

    samples = await interleave({one: partial(_seconds, encode) for one, encode in subjects.items()}, rounds)
    ratios = [theirs / ours for ours, theirs in zip(samples["ours"], samples["theirs"], strict=True)]
    return [
        figure(f"picture_{name}_vs_transformers", ratios, "ratio", "transformers' encoder, the same weights", _GOAL),
        figure(f"picture_{name}_ms", [1e3 * one for one in samples["ours"]], "ms", "for scale"),
    ]


async def _seconds(encode: Encode, number: int) -> float:
    begin = time.perf_counter()
    encode()
    return time.perf_counter() - begin


def tile_encoders(place: Path) -> Encoders:
    """Of Llama 4's form; `place` is for the checkpoint."""
    import transformers

    text = {**_TEXT, "head_dim": 32, "intermediate_size_mlp": 64, "num_local_experts": 2}
    config = transformers.Llama4Config(text_config=text, vision_config=_TILES, image_token_index=243)
    model = _drawn(transformers.Llama4ForConditionalGeneration, config, place)
    part = inspect(place).pictures
    assert part is not None
    tower = tower_of(part, torch.float32, torch.device("cpu"))
    pixels = _noise()
    levels = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.bfloat16) * (1 / 255)
    values = ((levels - 0.5) / 0.5).float()

    @torch.inference_mode()
    def theirs() -> torch.Tensor:
        found: torch.Tensor = model.multi_modal_projector(model.get_image_features(values).last_hidden_state)
        return found

    return Encoders(lambda: embeddings(tower, pixels), theirs)


def cell_encoders(place: Path) -> Encoders:
    """Of Qwen2.5-VL's form; `place` is for the checkpoint."""
    import transformers

    text = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=_CELLS, image_token_id=243)
    model = _drawn(transformers.Qwen2_5_VLForConditionalGeneration, config, place)
    part = inspect(place).pictures
    assert part is not None and isinstance(part.form, PatchForm)
    tower, form = tower_of(part, torch.float32, torch.device("cpu")), part.form
    pixels, count = _noise(), _SIDE // form.side
    mean, deviation = (torch.tensor(values) for values in (form.mean, form.deviation))
    levels = (torch.from_numpy(pixels[0]).float() / 255 - mean) / deviation
    parts = levels.view(count, 2, _PATCH, count, 2, _PATCH, 3).permute(0, 3, 1, 4, 6, 2, 5)
    patches = parts.reshape(-1, 3, 1, _PATCH, _PATCH).expand(-1, -1, 2, -1, -1).flatten(1)
    grid = torch.tensor([[1, 2 * count, 2 * count]])

    @torch.inference_mode()
    def theirs() -> torch.Tensor:
        found: torch.Tensor = model.model.visual(patches, grid_thw=grid).pooler_output
        return found.unsqueeze(0)

    return Encoders(lambda: embeddings(tower, pixels), theirs)


def _noise() -> Any:
    return np.random.default_rng(1).integers(0, 256, (1, _SIDE, _SIDE, 3), np.uint8)


def _drawn(kind: Any, config: Any, place: Path) -> Any:
    """A random model, which is saved too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = kind(config).float().eval()
        model.save_pretrained(place)
    write_tokenizer(place / "tokenizer.json")
    return model


async def _shown_again(pictures: int) -> list[Figure]:
    """Each picture is shown twice, in requests of their own."""
    with tempfile.TemporaryDirectory(prefix="penstock-pictures-") as place:
        model, port = write_seeing(Path(place) / "seeing", **_TILES), free_port()
        spec = up("mesh", model, port, MeshForm())
        async with (
            serving(spec, port) as server,
            AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        ):
            first, again = [], []
            for number in range(-1, pictures):
                url = picture_url(number + 1, _SIDE, _SIDE)
                seconds = [await _ttft(client, server.spec.model, url) for _ in range(2)]
                if number >= 0:  # the first one warms up
                    first.append(seconds[0])
                    again.append(seconds[1])
    ratios = [later / sooner for sooner, later in zip(first, again, strict=True)]
    against = "time to first token of a picture that nobody has shown"
    return [
        figure("picture_again_ttft", ratios, "ratio", against, lower_is_better=True),
        figure("picture_first_ttft_ms", [1e3 * one for one in first], "ms", "for scale"),
        figure("picture_again_ttft_ms", [1e3 * one for one in again], "ms", "for scale"),
    ]


async def _ttft(client: AsyncOpenAI, model: str, url: str) -> float:
    """Seconds to the first token of an answer about a picture."""
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    begin = time.perf_counter()
    messages: Any = [{"role": "user", "content": content}]
    async with await client.chat.completions.create(
        model=model, messages=messages, max_tokens=2, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content is not None:
                seconds = time.perf_counter() - begin
                async for _ in chunks:
                    pass
                return seconds
    raise RuntimeError(f"no token came: {json.dumps(content)[:80]}")

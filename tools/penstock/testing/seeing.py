"""Tiny random checkpoints of models that see pictures, Llama 4 and Qwen2.5-VL, in milliseconds and without torch."""

from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from penstock.checkpoint import picture_form
from penstock.checkpoint.files import Json
from penstock.pictures.patches import PATCH
from penstock.pictures.tiles import TEXTS
from penstock.testing.checkpoints import TINY_LLAMA_4, TinyModel, write_checkpoint

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text if part.type == 'text' else 'WHOLE' }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 7,
    "vision_output_dim": 24,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
}
_PATCHES = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 7,
    "window_size": 28,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
_FIRST = 260
"""Id of the first of the tokens around pictures."""


def write_seeing(directory: Path, seed: int = 7, **vision: int) -> Path:
    """Fills `directory` (made if missing) with a Llama 4, whose pictures are as `vision` says, and returns it."""
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "vision_config": {**_VISION, **vision},
        "image_token_index": _FIRST + list(TEXTS).index("patch"),
    }
    return _written(
        directory, replace(TINY_LLAMA_4, seed=seed), config, {"max_patches": 4}, [*TEXTS.values()], whole=TEXTS["whole"]
    )


def write_seeing_whole(directory: Path, seed: int = 7) -> Path:
    """Likewise with a Qwen2.5-VL, which does not cut pictures into tiles."""
    config = {
        "vision_config": _PATCHES,
        "image_token_id": _FIRST,
    }
    how = {"min_pixels": 28 * 28, "max_pixels": 70 * 70, "patch_size": 7}
    plain = TinyModel("Qwen2_5_VLForConditionalGeneration", seed=seed)
    return _written(directory, plain, config, how, [PATCH], whole=PATCH)


def _written(directory: Path, plain: TinyModel, more: Json, how: Json, texts: list[str], *, whole: str) -> Path:
    """A model of texts, which sees pictures with `more` in its config.json; `how` they are made ready, `texts` are of
    tokens that only pictures have, and the template writes `whole` for each."""
    write_checkpoint(directory, replace(plain, vocab_size=_FIRST + len(texts)))
    file = directory / "config.json"
    config = json.loads(file.read_text()) | more
    file.write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(how))
    (directory / "chat_template.jinja").write_text(_TEMPLATE.replace("WHOLE", whole))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts])
    tokenizer.save(str(directory / "tokenizer.json"))
    form = picture_form(directory, config)
    assert form is not None
    random, weights = np.random.default_rng(plain.seed), load_file(directory / "model.safetensors")
    for name, shape in form.tensors(config["hidden_size"]).items():
        noise = random.standard_normal(shape, dtype=np.float32)
        norm = ("norm" in name or "ln_q" in name) and name.endswith(".weight")
        inputs = math.prod(shape[1:]) if shape[1:] else shape[0]
        weights[name] = 1 + noise / 10 if norm else noise * np.float32(1.5 / np.sqrt(inputs))
    save_file(weights, directory / "model.safetensors")
    return directory


def picture_url(seed: int, width: int, height: int, kind: str = "PNG") -> str:
    """A data: URL of a picture of noise; PNG and WebP are exact."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"

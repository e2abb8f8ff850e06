"""A tiny random checkpoint of a model that sees pictures: Llama 4, in milliseconds and without torch."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from penstock.checkpoint import picture_form
from penstock.pictures.tiles import TEXTS
from penstock.testing.checkpoints import TINY_LLAMA_4, write_checkpoint

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text if part.type == 'text' else '<|image|>' }}{% endfor %}"
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
_FIRST = 260
"""Id of the first of the tokens around pictures."""


def write_seeing(directory: Path, seed: int = 7) -> Path:
    """Fills `directory` (made if missing) and returns it."""
    write_checkpoint(directory, replace(TINY_LLAMA_4, vocab_size=_FIRST + len(TEXTS), seed=seed))
    file = directory / "config.json"
    config = json.loads(file.read_text())
    token = _FIRST + list(TEXTS).index("patch")
    config |= {
        "architectures": ["Llama4ForConditionalGeneration"],
        "vision_config": _VISION,
        "image_token_index": token,
    }
    file.write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps({"max_patches": 4}))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in TEXTS.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    form = picture_form(directory, config)
    assert form is not None
    random, weights = np.random.default_rng(seed), load_file(directory / "model.safetensors")
    for name, shape in form.tensors(config["hidden_size"]).items():
        noise = random.standard_normal(shape, dtype=np.float32)
        norm = "norm" in name and name.endswith(".weight")
        weights[name] = 1 + noise / 10 if norm else noise * np.float32(1.5 / np.sqrt(shape[-1]))
    save_file(weights, directory / "model.safetensors")
    return directory


def picture_url(seed: int, width: int, height: int, kind: str = "PNG") -> str:
    """A data: URL of a picture of noise; PNG and WebP are exact."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"

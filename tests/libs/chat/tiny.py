"""A small byte-level tokenizer with ChatML tokens, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (Path(__file__).parents[3] / "libs/penstock/models/chat_template.jinja").read_text()
CORPUS = [
    "the quick brown fox jumps over the lazy dog. user assistant system tool\n",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n',
]


def tiny_tokenizer() -> Tokenizer:
    """About 600 tokens; merges make "assistant\\n" and the like one piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def write_model(directory: Path, template: str = TEMPLATE) -> Path:
    """A model directory without weights."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory

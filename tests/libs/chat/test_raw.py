"""Raw text becomes the ids that `transformers` makes of it, for tokenizers in the style of every served family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from penstock.chat.messages import Message
from penstock.chat.model import load_chat_model
from penstock.checkpoint import SUPPORTED

CORPUS = ["the quick brown fox jumps over the lazy dog. Good morning, Oslo! 12345 äöü\n"] * 8
WRITES_BOS = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def pieces(tokens: tuple[str, ...], **settings: Any) -> Tokenizer:
    """A BPE of SentencePiece's kind: bytes for what has no piece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = sorted({*"".join(CORPUS), "\u2581"})
    first = [*special(*tokens), *(AddedToken(piece, special=False) for piece in fallback)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=first, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [entry for entry in made["added_tokens"] if entry["content"] in tokens]
    return Tokenizer.from_str(json.dumps(made))


def bytes_of(tokens: tuple[str, ...], **settings: Any) -> Tokenizer:
    """A BPE over bytes, as of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special(*tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def around(tokenizer: Tokenizer, single: str, *tokens: str) -> processors.TemplateProcessing:
    named = [(token, tokenizer.token_to_id(token)) for token in tokens]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=named)


def llama_2() -> tuple[Tokenizer, dict[str, Any]]:
    front = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = pieces(("<unk>", "<s>", "</s>"), normalizer=front)
    tokenizer.post_processor = around(tokenizer, "<s> $A", "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def llama_3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = bytes_of(("<|begin_of_text|>", "<|end_of_text|>"))
    template = around(tokenizer, "<|begin_of_text|> $A", "<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def mistral() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = pieces(
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        pre_tokenizer=pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False),
    )
    tokenizer.post_processor = around(tokenizer, "<s> $A", "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def gemma() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = pieces(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        normalizer=normalizers.Replace(" ", "\u2581"),
    )
    tokenizer.post_processor = around(tokenizer, "<bos> $A", "<bos>")
    return tokenizer, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def qwen() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = bytes_of(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), normalizer=normalizers.NFC())
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}


def phi_3() -> tuple[Tokenizer, dict[str, Any]]:
    front = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = pieces(("<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>"), normalizer=front)
    tokenizer.post_processor = around(tokenizer, "$A")
    return tokenizer, {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False}


def kimi() -> tuple[Tokenizer, dict[str, Any]]:
    """As what is made of a tiktoken file: nothing is put around a text."""
    return bytes_of(("[BOS]", "[EOS]", "<|im_end|>")), {"bos_token": "[BOS]", "eos_token": "[EOS]"}


def both_ends() -> tuple[Tokenizer, dict[str, Any]]:
    """No family's own, but a post-processor may put something behind the text too."""
    tokenizer, settings = llama_3()
    tokenizer.post_processor = around(tokenizer, "<|begin_of_text|> $A <|end_of_text|>", *settings.values())
    return tokenizer, settings


STYLES: dict[str, list[Callable[[], tuple[Tokenizer, dict[str, Any]]]]] = {
    "LlamaForCausalLM": [llama_2, llama_3, both_ends],
    "MistralForCausalLM": [mistral, llama_2],
    "MixtralForCausalLM": [mistral, llama_2],
    "Qwen2ForCausalLM": [qwen],
    "Qwen3ForCausalLM": [qwen],
    "Qwen3MoeForCausalLM": [qwen],
    "Gemma2ForCausalLM": [gemma],
    "Gemma3ForCausalLM": [gemma],
    "Gemma3ForConditionalGeneration": [gemma],
    "Phi3ForCausalLM": [phi_3],
    "DeepseekV3ForCausalLM": [llama_3],
    "Kimi_K25ForConditionalGeneration": [kimi],
    "KimiK25ForConditionalGeneration": [kimi],
    "Llama4ForCausalLM": [llama_3],
    "Llama4ForConditionalGeneration": [llama_3],
    "Qwen2_5_VLForConditionalGeneration": [qwen],
}
BOS = {llama_2: 1, llama_3: 1, mistral: 1, gemma: 1, both_ends: 1, qwen: 0, phi_3: 0, kimi: 0}
MADE = sorted({style for styles in STYLES.values() for style in styles}, key=lambda style: style.__name__)


def write(directory: Path, style: Callable[[], tuple[Tokenizer, dict[str, Any]]]) -> dict[str, Any]:
    tokenizer, settings = style()
    tokenizer.enable_truncation(max_length=5)  # as some files hold from their training: it is not for serving
    tokenizer.save(str(directory / "tokenizer.json"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": WRITES_BOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return settings


def test_every_family_has_its_style():
    assert set(STYLES) == set(SUPPORTED)


@pytest.mark.parametrize("style", MADE)
def test_raw_text(tmp_path, style):
    settings = write(tmp_path, style)
    model, oracle = load_chat_model(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    texts = [
        "the quick brown fox",
        "",
        " two  spaces\n\nand lines ",
        "äöü 🎉",
        f"{settings['eos_token']} a control token",
    ]
    if settings["bos_token"]:
        texts.append(f"{settings['bos_token']}its own")
    for text in texts:
        assert list(model.encoder.encode_raw(text)) == oracle(text)["input_ids"], text
    first = model.encoder.encode_raw("the fox")[0]
    assert (model.tokenizer.id_to_token(first) == settings["bos_token"]) == bool(BOS[style])


@pytest.mark.parametrize("style", MADE)
def test_a_template_that_writes_the_bos_gets_one(tmp_path, style):
    settings = write(tmp_path, style)
    model, oracle = load_chat_model(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "the quick brown fox"}]
    ids = list(model.encoder.encode(model.render([Message("user", "the quick brown fox")], [])).ids)
    assert ids == oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    if settings["bos_token"]:
        assert ids.count(model.tokenizer.token_to_id(settings["bos_token"])) == 1

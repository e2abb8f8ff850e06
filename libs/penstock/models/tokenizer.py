"""The pair's tokenizer: byte-level BPE of about 4k tokens whose splitter keeps a word's tokens the same everywhere.

A model this small copies what it has seen only if it sees the same tokens again, so letters, digits,
punctuation and white space are cut apart before merging: `weather` is one piece after a quote, a space, an
underscore or at a line's start. Quotes, brackets, commas and colons of JSON form their own runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
VOCABULARY = 4096
SPLIT = (
    r"\p{Lu}?\p{Ll}+|\p{L}|\p{N}"  # words, single capitals, single digits
    r'|[{}\[\]",:]+(?: [{\["]+)?'  # JSON structure: `": "`, `", "`, `"}}`
    r'|[^\s\p{L}\p{N}{}\[\]",:]+'  # other punctuation
    r"|\n| |\s"
)


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Learn merges from `texts`; deterministic for the same texts in the same order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(t, special=t.startswith("<|"), normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def save(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "additional_special_tokens": [SPECIAL[IM_START]],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "split_special_tokens": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def ids_and_starts(tokenizer: Tokenizer, text: str) -> tuple[Sequence[int], list[int]]:
    """The ids of `text` and the character at which each begins."""
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return encoded.ids, [start for start, _ in encoded.offsets]

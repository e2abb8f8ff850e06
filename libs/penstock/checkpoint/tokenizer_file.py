"""Where a model directory's tokenizer is: tokenizer.json, or one made from a tiktoken file.

Some checkpoints (Kimi K2) come with `tiktoken.model`, a list of tokens with their ranks, and say in the Python code of
their tokenizer how texts are cut before they are merged. That code is read, not run. What is made of it is kept in the
user's cache under a name that stands for the bytes of all that it is made from, so that every service of a mesh finds
the same file.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.checkpoint.byte_level import byte_table
from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.files import read_object_if_there
from penstock.runtime.caches import cache_directory
from penstock.runtime.private import locked

_RANKS, _CODE, _PATTERN = "tiktoken.model", "tokenization_*.py", "pat_str"
_VERSION = b"penstock tiktoken v1"
_MOST_BYTES = 64 << 20
_MOST_RESERVED = 4096
"""Ids beyond the ranks that may have no name."""


def tokenizer_file(directory: Path) -> Path:
    """The directory's tokenizer.json, or the file made from its tiktoken.model. Raises CheckpointError."""
    file, ranks = directory / "tokenizer.json", directory / _RANKS
    if file.exists() or not ranks.exists():
        return file
    sources = [ranks, directory / "tokenizer_config.json", *sorted(directory.glob(_CODE))]
    digest = hashlib.sha256(_VERSION)
    try:
        for source in sources:
            content = source.read_bytes() if source.exists() else b""
            digest.update(len(content).to_bytes(8, "little") + content)
        kept = cache_directory("tokenizers")
        made = kept / f"{digest.hexdigest()}.json"
        with locked(kept):  # of several services that start at once one makes it
            if not made.exists():
                part = made.with_suffix(".part")
                part.write_text(converted(directory))
                part.replace(made)
    except OSError as error:
        raise CheckpointError(ranks, f"cannot be made into a tokenizer.json: {error}") from None
    return made


def converted(directory: Path) -> str:
    """tokenizer.json's text for the tokens of tiktoken.model. Raises CheckpointError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = _read_ranks(directory / _RANKS)
    pattern = _pattern(directory)
    symbols = {byte: symbol for symbol, byte in byte_table().items()}
    words = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = [(words[left], words[right]) for left, right in _merges(ranks)]
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    try:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(directory, f"{_PATTERN} is no pattern that tokenizers reads: {error}") from None
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _specials(directory, len(ranks))]
    )
    text: str = tokenizer.to_str()
    return text


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Tokens by rank, which are 0, 1, 2...: a rank is the token's id."""
    if file.stat().st_size > _MOST_BYTES:
        raise CheckpointError(file, f"has more than {_MOST_BYTES} bytes: this is not a list of tokens")
    try:
        from tiktoken.load import load_tiktoken_bpe
    except ImportError:
        raise CheckpointError(file, "needs the package tiktoken: pip install 'penstock[tiktoken]'") from None
    try:
        known = hashlib.sha256(file.read_bytes()).hexdigest()  # else it may take what lies in /tmp for the file
        ranks: dict[bytes, int] = load_tiktoken_bpe(str(file), expected_hash=known)
    except ValueError as error:
        raise CheckpointError(file, f"is not a tiktoken file: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(file, "the ranks of its tokens are not 0, 1, 2, ..., each once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(file, f"has no token for byte {missing[0]}: not every text could be read")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that make a token, in the order of what they make: pairs of the lowest rank merge first."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _pattern(directory: Path) -> str:
    """How a text is cut: `pat_str` in tokenizer_config.json, or in the tokenizer's code, where it is a string or
    "...".join of strings."""
    given = read_object_if_there(directory / "tokenizer_config.json").get(_PATTERN)
    if isinstance(given, str):
        return given
    for file in sorted(directory.glob(_CODE)):
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CheckpointError(file, f"is not Python: {error}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and [_name(target) for target in node.targets] == [_PATTERN]:
                found = _text(node.value)
                if found is None:
                    raise CheckpointError(file, f"{_PATTERN} is neither a string nor a join of strings")
                return found
    raise CheckpointError(
        directory / _RANKS, f"needs {_PATTERN}, in tokenizer_config.json or in {_CODE}: how texts are cut into words"
    )


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def _text(value: ast.expr) -> str | None:
    """A string literal's text, or that of "...".join([...])."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "join"):
        return None
    between = _text(value.func.value)
    if between is None or len(value.args) != 1 or not isinstance(value.args[0], ast.List | ast.Tuple):
        return None
    parts = [_text(each) for each in value.args[0].elts]
    return None if None in parts else between.join(part for part in parts if part is not None)


def _specials(directory: Path, first: int) -> list[str]:
    """The texts of the ids behind the ranks, one for each: those without a name are reserved."""
    file = directory / "tokenizer_config.json"
    added = read_object_if_there(file).get("added_tokens_decoder") or {}
    names: dict[int, str] = {}
    try:
        for number, what in added.items():
            names[int(number)] = str(what["content"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(file, "added_tokens_decoder must have an object with content for each id") from None
    if not names:
        return []
    if min(names) < first or max(names) >= first + len(names) + _MOST_RESERVED or len(set(names.values())) < len(names):
        raise CheckpointError(
            file,
            f"added_tokens_decoder must name ids from {first} on, behind those of {_RANKS}, each text once",
        )
    return [names.get(number, f"<|reserved_token_{number}|>") for number in range(first, max(names) + 1)]

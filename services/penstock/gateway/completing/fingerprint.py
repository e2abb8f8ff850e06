"""One name for everything that the tokens of an answer depend on, apart from the request itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from penstock.chat.model import ChatModel
from penstock.kv.spec import KvSpec


def system_fingerprint(spec: KvSpec, model: ChatModel, settings: Sequence[str] = (), adapter: str = "") -> str:
    """OpenAI's `system_fingerprint`: the same request with the same seed gives the same tokens while it is the same.

    Weights, their numbers and the layout are as the workers report them; text becomes tokens here. `settings` are the
    gateway's that change prompts, `adapter` is the fingerprint of what is added to the model.
    """
    parts = (
        _VERSION,
        spec.model,
        spec.tokenizer,
        spec.layout,
        spec.dtype,
        str(spec.block_size),
        model.fingerprint,
        model.template.source if model.template else "",
        ",".join(map(str, sorted(model.eos_ids))),
        *settings,
        *((adapter,) if adapter else ()),
    )
    digest = hashlib.sha256(b"penstock system v1")
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return f"fp_{digest.hexdigest()[:16]}"


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:  # a checkout on the path, not installed
        return ""


_VERSION = _version()  # reads files: not while a client waits

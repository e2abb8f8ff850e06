"""Where the gateway's models come from: its own settings, and a TOML file of further ones::

["qwen3-8b"]              # the name that clients use
dir = "/models/Qwen3-8B"  # relative to the file

["phi-4"]
dir = "/models/phi-4"
tool_format = "phi"       # if it has to be said
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from penstock.chat.formats.families import FORMATS
from penstock.chat.model import ChatModel, ChatModelError, load_chat_model
from penstock.gateway.config import GatewayConfig
from penstock.runtime.config import ConfigError

_MOST = 64
_LONGEST_NAME = 256


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dir: str
    tool_format: str = ""


_Entries = dict[str, _Entry]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model to serve."""

    name: str
    dir: Path
    model: ChatModel


def read_models(config: GatewayConfig) -> list[ModelSource]:
    """All models, the one of the gateway's own settings first. Raises ConfigError."""
    first = _load("model_dir", config.served_name, config.model_dir, config.tool_format)
    return [first, *(_further(config.models, first.name) if config.models else ())]


def _further(file: Path, first: str) -> list[ModelSource]:
    try:
        entries = msgspec.convert(tomllib.loads(file.read_text()), _Entries)
    except OSError as error:
        raise ConfigError("models", str(file), f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError("models", str(file), f"is not valid: {error}") from None
    if len(entries) >= _MOST:
        raise ConfigError("models", str(file), f"must name less than {_MOST} models")
    return [_entry(file, first, name, entry) for name, entry in entries.items()]


def _entry(file: Path, first: str, name: str, entry: _Entry) -> ModelSource:
    if name == first:
        raise ConfigError("models", str(file), f"{name!r} is the name of the model in model_dir already")
    if not 1 <= len(name.encode()) <= _LONGEST_NAME:
        raise ConfigError("models", str(file), f"a model's name has 1 to {_LONGEST_NAME} bytes, not {name[:40]!r}")
    if entry.tool_format and entry.tool_format not in FORMATS:
        raise ConfigError("models", str(file), f"{name}.tool_format must be one of {', '.join(FORMATS)}")
    return _load("models", name, file.parent / entry.dir, entry.tool_format)


def _load(setting: str, name: str, directory: Path, tool_format: str) -> ModelSource:
    try:
        model = load_chat_model(directory, tool_format)
    except ChatModelError as error:
        raise ConfigError(setting, str(directory), str(error)) from None
    log = structlog.get_logger("penstock.gateway")
    log.info("tool calls", model=name, format=model.family.name, reasoning=model.thinks)
    return ModelSource(name, directory, model)

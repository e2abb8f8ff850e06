"""Where the gateway's models come from: its own settings, and a TOML file of further ones::

["qwen3-8b"]              # the name that clients use
dir = "/models/Qwen3-8B"  # relative to the file

["phi-4"]
dir = "/models/phi-4"
tool_format = "phi"       # if it has to be said
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
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
    found = [_load("model_dir", config.served_name, config.model_dir, config.tool_format)]
    for wanted in _further(config):
        if not 1 <= len(wanted.name.encode()) <= _LONGEST_NAME:
            right = f"a model's name has 1 to {_LONGEST_NAME} bytes, not {wanted.name[:40]!r}"
            raise ConfigError(wanted.setting, wanted.said, right)
        if any(one.name == wanted.name for one in found):
            where = "in model_dir already" if wanted.name == found[0].name else "named before"
            raise ConfigError(wanted.setting, wanted.said, f"{wanted.name!r} is the name of the model {where}")
        if len(found) >= _MOST:
            raise ConfigError(wanted.setting, wanted.said, f"must name less than {_MOST} models")
        found.append(_load(wanted.setting, wanted.name, wanted.dir, wanted.tool_format))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A further model, and the setting that names it."""

    name: str
    dir: Path
    tool_format: str = ""
    setting: str
    said: str


def _further(config: GatewayConfig) -> Iterator[_Wanted]:
    if config.models is not None:
        yield from _of_file(config.models)
    for said in config.also:
        name, equals, directory = said.partition("=")
        if not equals or not directory:
            raise ConfigError("also", said, "must be NAME=DIRECTORY")
        yield _Wanted(name=name, dir=Path(directory), setting="also", said=said)


def _of_file(file: Path) -> Iterator[_Wanted]:
    try:
        entries = msgspec.convert(tomllib.loads(file.read_text()), _Entries)
    except OSError as error:
        raise ConfigError("models", str(file), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError("models", str(file), f"is not valid: {error}") from None
    for name, entry in entries.items():
        if entry.tool_format and entry.tool_format not in FORMATS:
            raise ConfigError("models", str(file), f"{name}.tool_format must be one of {', '.join(FORMATS)}")
        directory, tool_format = file.parent / entry.dir, entry.tool_format
        yield _Wanted(name=name, dir=directory, tool_format=tool_format, setting="models", said=str(file))


def _load(setting: str, name: str, directory: Path, tool_format: str) -> ModelSource:
    try:
        model = load_chat_model(directory, tool_format)
    except ChatModelError as error:
        raise ConfigError(setting, str(directory), str(error)) from None
    log = structlog.get_logger("penstock.gateway")
    log.info("tool calls", model=name, format=model.family.name, reasoning=model.thinks)
    return ModelSource(name, directory, model)

"""Configuration: one frozen dataclass per service, read once, command line > environment > TOML file.

`service_app("router", serve, RouterConfig)` gives the service's command line. A field `kv_host_bytes` is
`--kv-host-bytes`, `PENSTOCK_KVSTORE_KV_HOST_BYTES`, or `kv_host_bytes` in the table `[kvstore]` of the file
that `PENSTOCK_CONFIG` names (default: penstock.toml in the working directory, when there is one).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from cyclopts import App, Parameter, Token
from cyclopts.config import Env, Toml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


class ConfigError(ValueError):
    """A setting that can't be used."""

    def __init__(self, field: str, value: object, right: str) -> None:
        """`right` says what would be possible."""
        super().__init__(f"{field} = {value!r}: {right}")


def parse_size(text: str) -> int:
    """`"2GiB"` -> 2147483648. Raises ValueError that says what would be right."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    return int(float(match[1]) * unit)


def format_size(size: int) -> str:
    """The shortest exact form: 2147483648 -> `2GiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"


def _convert_size(_type: Any, tokens: Sequence[Token]) -> int:
    return parse_size(tokens[0].value)


Config = TypeVar("Config")

Size = Annotated[int, Parameter(converter=_convert_size)]
"""A number of bytes, written as `512MiB` or `2GiB`."""


class _ServiceApp(App):
    """Ends with one line for a setting that can't be used: the configuration is made while arguments are bound."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ConfigError as error:
            sys.exit(f"{self.name[0]}: {error}")


def resolve_hints(config_type: Any) -> None:
    """Makes the field types of a dataclass readable for cyclopts, also those inherited from another module."""
    hints = get_type_hints(config_type, include_extras=True)
    config_type.__init__.__annotations__ = {
        name: hints.get(name, hint) for name, hint in config_type.__init__.__annotations__.items()
    }


def sources(table: str) -> list[Any]:
    """Where a command's settings come from when the command line is silent: environment, then file."""
    return [
        Env(f"PENSTOCK_{table.upper()}_", command=False),
        Toml(os.environ.get("PENSTOCK_CONFIG", "penstock.toml"), root_keys=[table], must_exist=False),
    ]


def arguments(settings: DataclassInstance, always: Collection[str] = ()) -> Iterator[str]:
    """The command line that gives another process these settings: those that differ from their defaults, and `always`,
    over which that process's own environment and file shall have no say."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != field.default or field.name in always:
            yield from (f"--{field.name.replace('_', '-')}", str(value))


def service_app(name: str, serve: Callable[[Config], None], config_type: Callable[[], Config]) -> App:
    """The command line of one service; `serve(config)` runs it."""
    table = name.replace("-", "_")
    app = _ServiceApp(name=f"penstock.{table}", config=sources(table), help=serve.__doc__ or "")

    def start(config: Any = None) -> None:
        serve(config if config is not None else config_type())

    resolve_hints(config_type)
    start.__annotations__["config"] = Annotated[config_type, Parameter(name="*")] | None
    app.default(start)
    return app

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
from inspect import Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from cyclopts import App, Parameter, Token
from cyclopts.config import Env, Toml

from penstock.runtime.addresses import HostPort, SocketAddress, socket_address

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

_PORT_FORM = "host:port, for example 127.0.0.1:7401"
ADDRESS_FORMS = f"{_PORT_FORM}, or unix:/path"

LOG_LEVELS = ("debug", "info", "warning", "error")


COMMAND = "PENSTOCK_COMMAND"
"""The environment variable with the name under which a service's command line was called."""


class ConfigError(ValueError):
    """A setting that cannot be used."""

    def __init__(self, field: str, value: object, right: str) -> None:
        """`right` says which values are possible."""
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


def _convert_address(_type: Any, tokens: Sequence[Token]) -> SocketAddress:
    return socket_address(tokens[0].value)


def _convert_port(_type: Any, tokens: Sequence[Token]) -> HostPort:
    return HostPort(tokens[0].value)


def _convert_optional_address(_type: Any, tokens: Sequence[Token]) -> SocketAddress | None:
    return socket_address(tokens[0].value) if tokens[0].value else None


def _convert_optional_port(_type: Any, tokens: Sequence[Token]) -> HostPort | None:
    return HostPort(tokens[0].value) if tokens[0].value else None


Size = Annotated[int, Parameter(converter=_convert_size, show_default=format_size)]
"""A number of bytes, written as `512MiB` or `2GiB`."""

Address = Annotated[SocketAddress, Parameter(converter=_convert_address)]
"""host:port, or unix:/path. The settings class calls `addresses` in its `__post_init__`, for those who give plain
text."""

PortAddress = Annotated[HostPort, Parameter(converter=_convert_port)]
"""host:port alone. The settings class calls `port_addresses` in its `__post_init__`."""

OptionalAddress = Annotated[SocketAddress | None, Parameter(converter=_convert_optional_address)]
"""As Address; empty text is None. The settings class calls `optional_addresses` in its `__post_init__`."""

OptionalPortAddress = Annotated[HostPort | None, Parameter(converter=_convert_optional_port)]
"""As PortAddress; empty text is None. The settings class calls `optional_port_addresses` in its `__post_init__`."""


def _convert_addresses(_type: Any, tokens: Sequence[Token]) -> tuple[SocketAddress, ...]:
    return _listed(",".join(token.value for token in tokens))


def _listed(given: str | Sequence[str]) -> tuple[SocketAddress, ...]:
    """Raises ValueError that says what would be right."""
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(dict.fromkeys(socket_address(part.strip()) for part in parts if part.strip()))


Addresses = Annotated[tuple[SocketAddress, ...], Parameter(converter=_convert_addresses)]
"""Several of Address, in order: with commas between them, given again, or as a list. The settings class calls
`address_lists` in its `__post_init__`, for those who give plain text."""


def address_lists(config: object, *names: str) -> None:
    """Makes each named setting a tuple of addresses without repetitions; empty text is none. Raises ConfigError."""
    for name in names:
        value = getattr(config, name)
        try:
            object.__setattr__(config, name, _listed(value or ()))
        except ValueError:
            raise ConfigError(name, str(value), f"write {ADDRESS_FORMS}, and a comma between two") from None


def addresses(config: object, *names: str) -> None:
    """Makes each named setting a SocketAddress. Raises ConfigError."""
    for name in names:
        _set(config, name, socket_address, ADDRESS_FORMS)


def port_addresses(config: object, *names: str) -> None:
    """Makes each named setting a HostPort. Raises ConfigError."""
    for name in names:
        _set(config, name, HostPort, _PORT_FORM)


def optional_addresses(config: object, *names: str) -> None:
    """Makes each named setting a SocketAddress, or None where it is empty. Raises ConfigError."""
    for name in names:
        _set(config, name, lambda value: socket_address(value) if value else None, ADDRESS_FORMS)


def optional_port_addresses(config: object, *names: str) -> None:
    """Makes each named setting a HostPort, or None where it is empty. Raises ConfigError."""
    for name in names:
        _set(config, name, lambda value: HostPort(value) if value else None, _PORT_FORM)


def _set(config: object, name: str, read: Callable[[str], object], right: str) -> None:
    value = getattr(config, name)
    try:
        object.__setattr__(config, name, read(value))
    except ValueError:
        raise ConfigError(name, value, f"write {right}") from None


def at_least(config: object, least: float, *names: str) -> None:
    """Checks that each named setting is `least` or more. Raises ConfigError."""
    for name in names:
        if not getattr(config, name) >= least:  # also false for a NaN
            raise ConfigError(name, getattr(config, name), f"must be {least} or more")


def more_than(config: object, limit: float, *names: str) -> None:
    """Checks that each named setting is more than `limit`. Raises ConfigError."""
    for name in names:
        if not getattr(config, name) > limit:
            raise ConfigError(name, getattr(config, name), f"must be more than {limit}")


def within(config: object, least: float, most: float, *names: str) -> None:
    """Checks that each named setting is `least` to `most`, both included. Raises ConfigError."""
    for name in names:
        if not least <= getattr(config, name) <= most:
            raise ConfigError(name, getattr(config, name), f"must be {least} to {most}")


def one_of(config: object, allowed: Sequence[str], *names: str) -> None:
    """Checks that each named setting is one of `allowed`, of which there are two or more. Raises ConfigError."""
    for name in names:
        if getattr(config, name) not in allowed:
            right = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise ConfigError(name, getattr(config, name), f"must be {right}")


class _ServiceApp(App):
    """Ends with one line for a setting that cannot be used: the configuration is made while arguments are bound."""

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
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        if value == field.default and field.name not in always:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, tuple):
            for each in value:
                yield from (f"--{name}", str(each))
        else:
            yield from (f"--{name}", str(value))


def service_app(name: str, serve: Callable[[Config], None], config_type: Callable[[], Config]) -> App:
    """The command line of one service; `serve(config)` runs it."""
    table = name.replace("-", "_")
    command = os.environ.pop(COMMAND, f"penstock.{table}")
    app = _ServiceApp(name=command, config=sources(table), help=serve.__doc__ or "")

    def start(config: Any = None) -> None:
        serve(config if config is not None else config_type())

    def start_with(config: Any) -> None:
        serve(config)

    resolve_hints(config_type)
    hint: Any = Annotated[config_type, Parameter(name="*")]
    start.__annotations__["config"], start_with.__annotations__["config"] = hint | None, hint
    app.default(start_with if _needs_something(config_type) else start)
    return app


def _needs_something(config_type: Callable[..., object]) -> bool:
    """Whether a setting has no default: then a command line that gives nothing at all is refused like any other."""
    return any(field.default is Signature.empty for field in signature(config_type).parameters.values())

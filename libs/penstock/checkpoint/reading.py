"""Typed access to config.json; every complaint names the file, the field and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.errors import CheckpointError


class Reader:
    """The values of one JSON object. A field that is null counts as absent unless said otherwise."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def inner(self, values: Mapping[str, Any]) -> Reader:
        """A reader of an object inside the same file."""
        return Reader(self.file, values)

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(self.file, reason)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.fail(f"{key} must be a positive integer, not {value!r}")
        return value

    def count(self, key: str, default: int) -> int:
        """As `integer`, but 0 is possible."""
        value = self.values.get(key)
        value = default if value is None else value
        return 0 if type(value) is int and value == 0 else self.integer(key, default)

    def layer_numbers(self, key: str, layers: int) -> list[int]:
        """Numbers of layers; none when the field is absent."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(type(layer) is int and 0 <= layer < layers for layer in value):
            raise self.fail(f"{key} must be a list of layer numbers below {layers}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        return self._positive(key, default if value is None else value)

    def number_or_null(self, key: str, default: float | None) -> float | None:
        """Here null means none, and only an absent field has the default."""
        value = self.values.get(key, default)
        return None if value is None else self._positive(key, value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.fail(f"{key} must be a list of {count} numbers, not {value!r}")
        return tuple(self._positive(f"{key}[{at}]", each) for at, each in enumerate(value))

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, not {value!r}")
        return value

    def only(self, key: str, usual: Any, *allowed: Any) -> None:
        """Refuses any value but `allowed`; an absent field has the usual one."""
        value = self.values.get(key, usual)
        if value not in allowed:
            names = " or ".join("null" if each is None else str(each) for each in allowed)
            raise self.fail(f"{key} {value!r} is not supported, only {names}")

    def _positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"{key} must be a number, not {value!r}")
        try:
            number = float(value)
        except OverflowError:  # of an integer
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.fail(f"{key} must be a positive number, not {value!r}")
        return number

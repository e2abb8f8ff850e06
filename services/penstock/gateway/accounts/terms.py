"""The operator's terms: what tokens cost, and what each tenant may have. One TOML file::

currency = "USD"

[price.default]           # per million tokens; a model's own table, [price."NAME"], replaces it
input = 1.0
output = 3.0
cached = { gpu = 0.05, host = 0.1, nvme = 0.2, remote = 0.2, worker = 0.0 }  # what is missing costs as input

[limits.default]          # for each tenant without a table of its own; what is missing is unlimited
requests_per_minute = 600
tokens_per_minute = 2_000_000
concurrency = 32

[limits.acme]
spend_per_day = 25.0
weight = 2.0              # of its requests when they have to wait for workers; 1 when missing
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.gateway.request.work import TIERS
from penstock.runtime.config import ConfigError

_MILLION = 1_000_000
DEFAULT = "default"
MOST_WEIGHT = 1000


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a million tokens of one model."""

    input: float = 0.0
    output: float = 0.0
    cached: dict[str, float] = {}
    """By the tier that the KV came from."""

    def cost(self, computed: int, cached: Mapping[str, int], output: int) -> float:
        """Of one request."""
        total = computed * self.input + output * self.output
        total += sum(tokens * self.cached.get(tier, self.input) for tier, tokens in cached.items())
        return total / _MILLION


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one tenant; None is unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens, cached ones too."""
    concurrency: int | None = None
    """Requests at one time."""
    spend_per_day: float | None = None
    """In the currency of the prices, from midnight UTC on."""
    weight: float = 1.0
    """Its share beside others whose requests wait for workers too."""

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return any(
            limit is not None
            for limit in (self.requests_per_minute, self.tokens_per_minute, self.concurrency, self.spend_per_day)
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    currency: str = "USD"
    price: dict[str, Price] = {}
    limits: dict[str, Limits] = {}


@dataclass(frozen=True, slots=True)
class Terms:
    """Prices by model and limits by tenant."""

    currency: str = "USD"
    prices: Mapping[str, Price] = field(default_factory=dict)
    by_tenant: Mapping[str, Limits] = field(default_factory=dict)

    def price(self, model: str) -> Price:
        """What this model's tokens cost; with an adapter, MODEL:ADAPTER, as without where it has no price."""
        names = (model, model.rpartition(":")[0], DEFAULT)
        return next((self.prices[name] for name in names if name in self.prices), Price())

    def limits(self, tenant: str) -> Limits:
        """What this tenant may have."""
        return self.by_tenant.get(tenant) or self.by_tenant.get(DEFAULT) or Limits()


def read_terms(path: Path | None) -> Terms:
    """The terms of a file; without one, all is free and unlimited. Raises ConfigError."""
    if path is None:
        return Terms()
    try:
        file = msgspec.convert(tomllib.loads(path.read_text()), _File)
    except OSError as error:
        raise ConfigError("terms", str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError("terms", str(path), f"is not valid: {error}") from None
    for name, price in file.price.items():
        _check(path, f"price.{name}", {"input": price.input, "output": price.output, **price.cached})
        if unknown := set(price.cached) - set(TIERS):
            raise ConfigError("terms", str(path), f"price.{name}.cached: no tier {min(unknown)!r}; {', '.join(TIERS)}")
    for name, limits in file.limits.items():
        given = {each: getattr(limits, each) for each in limits.__struct_fields__}
        _check(path, f"limits.{name}", {each: value for each, value in given.items() if value is not None})
        if not 1 / MOST_WEIGHT <= limits.weight <= MOST_WEIGHT:
            right = f"must be from {1 / MOST_WEIGHT:g} to {MOST_WEIGHT}, not {limits.weight:g}"
            raise ConfigError("terms", str(path), f"limits.{name}.weight {right}")
    return Terms(file.currency, file.price, file.limits)


def _check(path: Path, table: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError("terms", str(path), f"{table}.{name} must be 0 or more, not {value}")

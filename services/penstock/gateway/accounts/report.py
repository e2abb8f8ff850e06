"""What a ledger's entries say to people and programs: by hour, by day or in total, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.errors import InvalidRequest
from penstock.gateway.accounts.entry import HOUR_S, NANO, Counts, Entries, LedgerLine

PERIODS = {"hour": HOUR_S, "day": 24 * HOUR_S, "total": 0}
_FAR = 253_402_300_800
"""Unix seconds of the year 10000."""


def instant(field: str, text: str) -> int:
    """Unix seconds of a time in ISO 8601 or in Unix seconds, UTC where it names no zone. Raises InvalidRequest."""
    try:
        if text.isdecimal():
            found = float(text)
        else:
            parsed = datetime.fromisoformat(text)
            found = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        found = -1
    if not 0 <= found < _FAR:
        right = f"{field}: must be a time such as 2026-11-22 or 2026-11-22T14:00Z, or Unix seconds; not {text[:40]!r}"
        raise InvalidRequest(right, field=field)
    return int(found)


def by_period(entries: Entries, period: str) -> dict[LedgerLine, Counts]:
    """Sums over the hours of each period, in order of time, tenant and model."""
    length = PERIODS[period]
    periods: dict[int, dict[LedgerLine, Counts]] = {}
    for account, counts in entries.items():
        start = account.hour - account.hour % length if length else 0
        summed = periods.setdefault(start, {})
        summed.setdefault(account._replace(hour=start), Counts()).add(counts)
    # each by itself: nobody else runs while a list is sorted
    return {account: periods[start][account] for start in sorted(periods) for account in sorted(periods[start])}


def rows(entries: Entries, period: str) -> list[dict[str, Any]]:
    """One row for each period, tenant and model."""
    return [
        {"start": None if period == "total" else _iso(account.hour), "tenant": account.tenant, "model": account.model}
        | {
            "requests": counts.requests,
            "input_tokens": counts.input_tokens,
            "computed_tokens": counts.computed_tokens,
            "cached_tokens": {
                "worker": counts.cached_worker,
                "gpu": counts.cached_gpu,
                "host": counts.cached_host,
                "nvme": counts.cached_nvme,
                "remote": counts.cached_remote,
            },
            "output_tokens": counts.output_tokens,
            "reasoning_tokens": counts.reasoning_tokens,
            "cost": counts.cost_nano / NANO,
        }
        for account, counts in by_period(entries, period).items()
    ]


def as_csv(found: Sequence[dict[str, Any]], currency: str) -> str:
    """The rows as RFC 4180 has them, with one column for each tier."""
    flat = [
        {
            **{name: value for name, value in row.items() if name not in ("cached_tokens", "cost")},
            **{f"cached_{tier}": tokens for tier, tokens in row["cached_tokens"].items()},
            "cost": row["cost"],
            "currency": currency,
        }
        for row in found
    ]
    file = io.StringIO()
    names = list(flat[0]) if flat else ["start", "tenant", "model", "requests"]
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in row.items()} for row in flat)
    return file.getvalue()


def _harmless(value: object) -> object:
    """Text that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

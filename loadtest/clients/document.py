"""docs/clients.md: the table of clients, as a run found it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from loadtest.clients.clients import OK, Tried

DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
_HEAD = """# Clients

Written by `make test-clients`: official clients, unchanged, against `penstock up` and the embedded model. What each
case does stands in `loadtest/clients/cases/`. The model is tiny, so the cases depend on the protocol alone: calls that
are required, schemas, limits. Load generators have no failed request, and count the tokens that the gateway counts. A
client that cancels leaves no request live, and the gateway's metrics count one more as cancelled, within a second.
schemathesis makes requests from `/openapi.json`, right and wrong ones.

"""


def document(tried: Sequence[Tried], conforms: str) -> str:
    """The whole file."""
    works = sum(each.unchanged for each in tried)
    rows = [
        "| client | versions | works | fails | not by default |",
        "|---|---|---|---|---|",
        *(_row(each) for each in tried),
    ]
    return f"{_HEAD}{works} of {len(tried)} clients work unchanged.\n\n" + "\n".join(rows) + f"\n\n{conforms}\n"


def _row(tried: Tried) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in tried.versions.items())
    works = ", ".join(_words(name) for name, found in tried.cases.items() if found == OK)
    fails = "; ".join(f"{_words(name)}: {_cell(found)}" for name, found in tried.cases.items() if found != OK)
    return f"| {tried.client} | {versions} | {works} | {fails} | {tried.note} |"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")[:300]

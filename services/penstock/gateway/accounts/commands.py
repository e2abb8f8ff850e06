"""`penstock keys`: adds, lists and revokes API keys in the file that gateways read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from penstock.gateway.accounts.keys import ApiKey, Role, new_key, read_keys, write_keys
from penstock.runtime.config import ConfigError

app = App(name="keys", help="Adds, lists and revokes API keys. A gateway follows the file without a restart.")

KeyFile = Annotated[Path, Parameter(name=("--file", "-f"))]
DEFAULT_FILE = Path("keys.json")


@app.command
def add(tenant: str, *, file: KeyFile = DEFAULT_FILE, operator: bool = False, note: str = "") -> None:
    """Makes a key and prints it, once: the file holds only its digest.

    Parameters
    ----------
    tenant:
        Whose key it is. Keys of one tenant share its cache, its limits and its account.
    file:
        The file that `--api-keys` of the gateway names; it is made when there is none.
    operator:
        A key that sees the accounts of all tenants, and generates nothing.
    note:
        What it is for.
    """
    if not tenant.strip():
        raise ConfigError("tenant", tenant, "must not be empty")
    keys = [*read_keys(file)] if file.exists() else []
    role: Role = "operator" if operator else "client"
    key, entry = new_key(tenant, role, note)
    _write(file, [*keys, entry])
    print(f"{entry.id}: {role} key of {tenant}, in {file}. It is shown this once:", file=sys.stderr)
    print(key)


@app.command(name="list")
def list_keys(*, file: KeyFile = DEFAULT_FILE) -> None:
    """Shows the keys of a file, without the keys themselves.

    Parameters
    ----------
    file:
        The key file.
    """
    table = Table(box=None)
    for column in ("id", "tenant", "role", "created", "note"):
        table.add_column(column, no_wrap=column == "id")
    for key in read_keys(file):
        table.add_row(key.id, key.tenant, key.role, key.created, key.note)
    Console().print(table)


@app.command
def revoke(id: str, *, file: KeyFile = DEFAULT_FILE) -> None:
    """Takes a key away; running gateways refuse it within a second or two.

    Parameters
    ----------
    id:
        As `penstock keys list` shows it.
    file:
        The key file.
    """
    keys = read_keys(file)
    left = [key for key in keys if key.id != id]
    if len(left) == len(keys):
        raise ConfigError("id", id, f"must be one of {', '.join(key.id for key in keys) or 'none: the file is empty'}")
    _write(file, left)
    print(f"{id} is revoked")


def _write(file: Path, keys: Sequence[ApiKey]) -> None:
    try:
        write_keys(file, keys)
    except OSError as error:
        raise ConfigError("file", str(file), f"cannot be written: {error.strerror}") from None

"""A key file for gateways under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.gateway.accounts.keys import Role, new_key, write_keys


def key_file(path: Path, tenants: Mapping[str, str], *, role: Role = "client", operators: Sequence[str] = ()) -> Path:
    """Writes a file in which each key stands for its tenant; `operators` are further keys, of operators."""
    keys = [new_key(tenant, role, key=key)[1] for key, tenant in tenants.items()]
    write_keys(path, [*keys, *(new_key("ops", "operator", key=key)[1] for key in operators)])
    return path

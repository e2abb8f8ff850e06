"""A key file for gateways under test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.gateway.accounts.keys import Role, new_key, write_keys


def key_file(path: Path, tenants: Mapping[str, str], *, role: Role = "client") -> Path:
    """Writes a file in which each key stands for its tenant."""
    write_keys(path, [new_key(tenant, role, key=key)[1] for key, tenant in tenants.items()])
    return path

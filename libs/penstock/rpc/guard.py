"""Lets each member call what its role may."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.errors import Forbidden
from penstock.rpc.identity import called_by, caller_of
from penstock.rpc.methods import allowed


@asynccontextmanager
async def by_role(method: str, _metadata: object, context: Any) -> AsyncIterator[None]:
    """The entrance of a server whose callers show certificates. Raises Forbidden."""
    caller = caller_of(context.auth_context())
    if caller is None:
        raise Forbidden(
            "the certificate names no member of the mesh: it needs one URI spiffe://penstock.internal/ROLE/NAME"
        )
    if caller.role not in (roles := allowed(method)):
        right = f"a certificate of {' or '.join(sorted(roles))} may" if roles else "nobody may"
        raise Forbidden(f"{method} may not be called by a {caller.role}: {right}")
    with called_by(caller):
        yield

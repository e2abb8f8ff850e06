"""Opens a Redis that a setting names, and asks it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from penstock.runtime.config import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_PATIENCE_S = 2.0
"""Seconds in which Redis has to take a connection, and to give each answer."""

Answer = TypeVar("Answer")


@asynccontextmanager
async def open_redis(setting: str, url: str) -> AsyncIterator[Redis]:
    """The client of the Redis at `url`, for the length of the block; it gives bytes. Nothing is asked of it yet.

    Raises ConfigError, which names the setting and the url without its password.
    """
    try:
        from redis.asyncio import Redis
    except ImportError:
        right = "needs the extra `redis`: pip install 'penstock[redis]'"
        raise ConfigError(setting, without_password(url), right) from None
    try:
        client = Redis.from_url(url, socket_timeout=_PATIENCE_S, socket_connect_timeout=_PATIENCE_S)
    except ValueError:  # its text may be a part of the password
        right = "must be redis://HOST:PORT/DATABASE, with USER:PASSWORD@ before the host where it asks for them"
        raise ConfigError(setting, without_password(url), right) from None
    try:
        yield client
    finally:
        await client.aclose()


async def asked(call: Awaitable[Answer]) -> Answer:
    """What Redis answers. Raises OSError when it refuses, is not there, or does not answer in time."""
    from redis.exceptions import RedisError

    try:
        return await call
    except RedisError as error:
        raise OSError(str(error)) from None


def without_password(url: str) -> str:
    """The address with `***` in place of user and password, and without options, which may be a password too."""
    address, _, options = url.partition("?")
    if "@" in options:  # then nobody knows where the password ends
        return address.partition("://")[0] + "://***"
    return re.sub("://.*@", "://***@", address)

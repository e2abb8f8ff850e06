"""Opens a Redis that a setting names, and asks it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast
from urllib.parse import unquote

from penstock.runtime.addresses import HostPort
from penstock.runtime.config import ConfigError
from penstock.runtime.findings import Finding

if TYPE_CHECKING:
    from redis.asyncio import Redis

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
REDIS_GROUP_SCHEMES = ("redis+cluster://", "rediss+cluster://", "redis+sentinel://")
"""Of several servers, for settings whose keys may lie on any of them."""
_RETRY_S = (0.1, 2.0)
"""First and longest pause after a failure."""
_PATIENCE_S = 2.0
"""Seconds in which Redis has to take a connection, and to give each answer."""

Answer = TypeVar("Answer")


class RedisRefused(OSError):
    """It is there, and does not do what it is asked: a password, or a right, is missing."""


@asynccontextmanager
async def open_redis(setting: str, url: str) -> AsyncIterator[Redis]:
    """The client of the Redis at `url`, for the length of the block; it gives bytes. Nothing is asked of it yet.

    Raises ConfigError, which names the setting and the url without its password.
    """
    try:
        import redis.asyncio  # noqa: F401
    except ImportError:
        right = "needs the extra `redis`: pip install 'penstock[redis]'"
        raise ConfigError(setting, without_password(url), right) from None
    try:
        client = _client(url)
    except ValueError:  # its text may be a part of the password
        raise ConfigError(setting, without_password(url), _RIGHT) from None
    try:
        yield client
    finally:
        await client.aclose()


_RIGHT = "must be redis://HOST:PORT/DATABASE, with USER:PASSWORD@ before the host where it asks for them"


def _client(url: str) -> Redis:
    """Raises ValueError."""
    from redis.asyncio import Redis

    scheme, _, rest = url.partition("://")
    if scheme in ("redis+cluster", "rediss+cluster"):
        from redis.asyncio.cluster import RedisCluster

        plain = f"{scheme.partition('+')[0]}://{rest}"
        cluster = RedisCluster.from_url(plain, socket_timeout=_PATIENCE_S, socket_connect_timeout=_PATIENCE_S)
        return cast("Redis", cluster)  # it has the same commands
    if scheme == "redis+sentinel":
        return _behind_sentinels(rest)
    from penstock.runtime.redis_pool import MOST_CONNECTIONS, FewIdle

    times = {"socket_timeout": _PATIENCE_S, "socket_connect_timeout": _PATIENCE_S}
    pool = FewIdle.from_url(url, max_connections=MOST_CONNECTIONS, **times)
    return Redis.from_pool(pool)


def _behind_sentinels(rest: str) -> Redis:
    """`[USER:PASSWORD@]HOST:PORT,HOST:PORT/SERVICE[/DATABASE]`; the password is the server's. Raises ValueError."""
    from redis.asyncio.sentinel import Sentinel

    where, _, path = rest.partition("/")
    login, _, hosts = where.rpartition("@")
    service, _, database = path.partition("/")
    sentinels = [HostPort(host) for host in hosts.split(",")]
    if not service:
        raise ValueError("no service")
    user, _, password = login.partition(":")
    times = {"socket_timeout": _PATIENCE_S, "socket_connect_timeout": _PATIENCE_S}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(one.host, one.port) for one in sentinels], sentinel_kwargs=times, **times
    )
    found = sentinel.master_for(
        service, username=unquote(user) or None, password=unquote(password) or None, db=int(database or 0)
    )
    return cast("Redis", found)


async def asked(call: Awaitable[Answer]) -> Answer:
    """What Redis answers. Raises OSError when it is not there, or does not answer in time, and RedisRefused."""
    from redis.exceptions import (
        AuthenticationError,
        AuthorizationError,
        RedisClusterException,
        RedisError,
        ResponseError,
    )

    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        answer = await call
    except (ResponseError, AuthenticationError, AuthorizationError) as error:
        raise RedisRefused(str(error)) from None
    except (RedisError, RedisClusterException) as error:
        raise OSError(str(error)) from None
    if task is not None and task.cancelling() > before:  # redis-py calls `wait_for`, which may lose it in Python 3.11
        raise asyncio.CancelledError
    return answer


def without_password(url: str) -> str:
    """The address with `***` in place of user and password, and without options, which may be a password too."""
    address, _, options = url.partition("?")
    if "@" in options:  # then nobody knows where the password ends
        return address.partition("://")[0] + "://***"
    return re.sub("://.*@", "://***@", address)


async def in_step(
    round: Callable[[], Awaitable[None]],
    failed: Callable[[OSError], None],
    stirred: asyncio.Event,
    *,
    pause_s: float,
    idle_s: float,
) -> NoReturn:
    """Exchanges something with a Redis, behind what the process does: makes a `round` whenever there is something to
    tell, which `stirred` says and a round clears; not more often than every `pause_s` seconds, and every `idle_s` in
    any case. An OSError of a round goes to `failed`; the next round comes after a pause that doubles with each failure
    in a row. Never returns; cancel it."""
    first, longest = _RETRY_S
    pause = first
    while True:
        try:
            await round()
        except OSError as error:  # a TimeoutError is one
            failed(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            continue
        pause = first
        await asyncio.sleep(pause_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(idle_s):
                await stirred.wait()


async def redis_found(setting: str, url: str) -> Finding:
    """Whether the Redis that a setting names answers."""
    where = without_password(url)
    try:
        async with open_redis(setting, url) as redis:
            await asked(redis.ping())
    except (ConfigError, OSError) as error:
        right = f"start that Redis, let this process reach it, or change --{setting.replace('_', '-')}"
        return Finding("redis", False, f"{where} does not answer: {error}", right)
    return Finding("redis", True, f"{where} answers")

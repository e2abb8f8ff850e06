"""The tier's directory: ours alone, one process at a time, one subdirectory per spec.

::

    lock
    manifest.json              what was used last, and what was written today
    <fingerprint>/manifest.json  the spec, and how its slabs are cut
    <fingerprint>/slab-000000.blocks ...

No name comes from a client. Manifests are replaced as a whole; one that can't be read counts as absent, and slabs
without a manifest are dropped.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from penstock.kv.spec import KvSpec
from penstock.kvstore.tiers.disk.format import VERSION, fingerprint
from penstock.kvstore.tiers.disk.slabs import SlabShape
from penstock.runtime.config import ConfigError

SLAB_BYTES = 256 << 20
_LEAST_SLABS, _MOST_SLABS = 4, 256
_MOST_MANIFEST = 64 << 10
_MANIFEST = "manifest.json"
_SPACE = re.compile(r"[0-9a-f]{32}")
_SLAB = re.compile(r"slab-\d{6}\.blocks")
_OURS = re.compile(r"manifest\.json(\.new)?|slab-\d{6}\.blocks")


def cut(block_bytes: int, total: int) -> SlabShape:
    """Slabs of one size that fill `total` bytes nearly: some 256 MiB each, and not more files than may be open."""
    one = SlabShape(block_bytes, 1).slot_bytes
    several = min(_LEAST_SLABS, total >> 20)  # so that one spec does not take all of a small disk at once
    slabs = max(1, several, min(_MOST_SLABS, -(-total // SLAB_BYTES)))
    return SlabShape(block_bytes, max(1, total // one // slabs))


def _fits(shape: SlabShape, total: int) -> bool:
    """Whether slabs cut for another total do for this one: at least one, and not more files than may be open."""
    return 1 <= total // shape.slab_bytes <= 2 * _MOST_SLABS


async def load(path: Path) -> dict[str, Any]:
    """A manifest; empty when there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        async with aiofiles.open(path, encoding="utf-8") as file:
            data = json.loads(await file.read(_MOST_MANIFEST))
        if isinstance(data, dict) and data.get("format") == VERSION:
            return data
    return {}


async def save(path: Path, data: dict[str, Any]) -> None:
    """Replaces a manifest. Raises OSError; then the old one is still there."""
    new = path.with_name(path.name + ".new")
    async with aiofiles.open(new, "w", encoding="utf-8", opener=_private) as file:
        await file.write(json.dumps({"format": VERSION, **data}, indent=1))
        await file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    await aiofiles.os.replace(new, path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class Home:
    """A directory that this process holds. `close` lets go of it."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the directory can't be ours."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError("nvme_dir", str(path), f"can't be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError("nvme_dir", str(path), "another store uses it; give each store its own") from None

    def close(self) -> None:
        """Another process may use the directory."""
        os.close(self._lock)

    async def read(self) -> dict[str, Any]:
        """Reads the manifest of the last process."""
        return await load(self.path / _MANIFEST)

    async def write(self, data: dict[str, Any]) -> None:
        """For the next process. Raises OSError."""
        await save(self.path / _MANIFEST, data)

    # -- spaces

    def space(self, spec: KvSpec) -> Path:
        """Where the slabs of a spec are."""
        return self.path / fingerprint(spec)[:16].hex()

    async def spec_of(self, name: object) -> KvSpec | None:
        """The spec of the subdirectory `name`, if there is one whose manifest agrees with its name."""
        if not isinstance(name, str) or not _SPACE.fullmatch(name):
            return None
        fields = (await load(self.path / name / _MANIFEST)).get("spec")
        try:
            spec = KvSpec(**fields) if isinstance(fields, dict) else None
            return spec if spec is not None and self.space(spec).name == name else None
        except (TypeError, ValueError):  # other fields, or texts that are none
            return None

    async def prepare(self, spec: KvSpec, total: int) -> SlabShape:
        """Makes the subdirectory of a spec, or finds it and says how it is cut. Raises OSError."""
        path, shape = self.space(spec), cut(spec.block_bytes, total)
        found = (await load(path / _MANIFEST)).get("slab_slots")
        if isinstance(found, int) and found >= 1 and _fits(SlabShape(spec.block_bytes, found), total):
            shape = SlabShape(spec.block_bytes, found)
        elif path.exists():
            await asyncio.to_thread(_remove, path)
        path.mkdir(mode=0o700, exist_ok=True)
        _check_owner(path)
        await save(path / _MANIFEST, {"spec": asdict(spec), "slab_slots": shape.slab_slots})
        return shape

    def make_room(self, size: int, total: int, keep: Collection[Path]) -> bool:
        """Drops slabs of specs whose spaces are not to be kept, the longest unused first, until `size` more bytes fit
        into `total`. Blocking."""
        sizes = {path: _size(path) for path in self._spaces()}
        for path in sorted(sizes, key=_used_at):
            if sum(sizes.values()) + size <= total:
                return True
            if path not in keep:
                _remove(path)
                sizes[path] = 0
        return sum(sizes.values()) + size <= total

    def _spaces(self) -> list[Path]:
        entries = [entry for entry in os.scandir(self.path) if _SPACE.fullmatch(entry.name)]
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _check_owner(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError("nvme_dir", str(path), f"belongs to user {status.st_uid}; use a directory of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError("nvme_dir", str(path), f"others may write to it; chmod 700 {path}")


def _used_at(path: Path) -> float:
    """When a space was used last; 0: it has no manifest, so its slabs are of no use to anybody."""
    try:
        return (path / _MANIFEST).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(path: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path) if _SLAB.fullmatch(entry.name))


def _remove(path: Path) -> None:
    """Removes our files, the manifest last, and the directory when nothing else is in it."""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name == _MANIFEST):
        if _OURS.fullmatch(entry.name):
            os.unlink(entry.path)
    with suppress(OSError):
        path.rmdir()

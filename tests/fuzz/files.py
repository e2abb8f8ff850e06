"""What operators write, and what a process finds on the disk that another one has left there, or half left."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.services.kvstore.helpers import spec

from penstock.gateway.accounts.auth import load_auth
from penstock.gateway.accounts.keys import read_keys, write_keys
from penstock.gateway.accounts.terms import read_terms
from penstock.gateway.batches.in_directory import open_directory_batches
from penstock.gateway.batches.journal import LineJournal
from penstock.gateway.batches.store import tenant_name
from penstock.gateway.completing.sources import _of_file
from penstock.gateway.config import GatewayConfig
from penstock.kvstore.tiers.disk.files import Files
from penstock.kvstore.tiers.disk.format import _HEADER_BYTES, PAGE, Drop, Header, fingerprint, pack, parse
from penstock.kvstore.tiers.disk.home import Home
from penstock.kvstore.tiers.disk.scan import scan
from penstock.kvstore.tiers.disk.slabs import Slabs, SlabShape
from penstock.runtime.config import ConfigError
from penstock.runtime.notes import read_note, write_note

from .contract import LOOP_S, Check, Contract, plain

HEAD = 256
"""Bytes of a slot that are in an input: the header, without the page's empty rest and the block."""
SPEC = spec(4096)
MARK = fingerprint(SPEC)


@contextmanager
def _file(name: str, read: Callable[[Path], object]) -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / name

        def check(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        yield check


def _keys(path: Path) -> None:
    """What was read is the same when it was written."""
    keys = read_keys(path)
    write_keys(path, keys)
    assert read_keys(path) == keys


def _terms(path: Path) -> None:
    terms = read_terms(path)
    assert terms.price("any").cost(1, {"host": 1}, 1) >= 0 and terms.limits("any").weight > 0


def _models(path: Path) -> None:
    assert all(wanted.said == str(path) for wanted in _of_file(path))


def _server_key(path: Path) -> None:
    assert (
        len(load_auth(GatewayConfig(router=("127.0.0.1:1",), model_dir=path, server_key_file=path)).namespace("tenant"))
        == 16
    )


def _note(path: Path) -> None:
    """No note, or the one that would be written."""
    path.chmod(0o600)
    if (word := read_note(path)) is not None:
        write_note(path, word)
        assert read_note(path) == word


def _journal(path: Path) -> None:
    """Whole lines are left, and more can be added."""
    before = path.read_bytes()
    journal = LineJournal(path)
    journal.open()
    journal.append([b"more\n"])
    journal.close()
    assert path.read_bytes() == before[: before.rfind(b"\n") + 1] + b"more\n"


def _slot(data: bytes) -> None:
    """What is taken for a header is one, byte by byte."""
    for length in (4096, 1):
        found = parse(data.ljust(PAGE, b"\0"), MARK, length)
        if isinstance(found, Header):
            assert pack(found, MARK)[:_HEADER_BYTES] == data[:_HEADER_BYTES] and found.length == length
        else:
            assert found is None or isinstance(found, Drop)
    assert parse(data[:100], MARK, 1) is Drop.TORN


@contextmanager
def _slab() -> Iterator[Check]:
    """The beginnings of slots, one behind the other: the scan finds what a look at each of them finds."""
    with tempfile.TemporaryDirectory() as root:
        shape = SlabShape(4096, 8)

        def check(data: bytes) -> None:
            heads = [data[at : at + HEAD] for at in range(0, len(data), HEAD)][: shape.slab_slots]
            content = b"".join(head.ljust(shape.slot_bytes, b"\0") for head in heads)
            (Path(root) / "slab-000000.blocks").write_bytes(content[: len(content) - len(data) % 7])
            slabs = Slabs(Path(root), shape, MARK, Files(), direct=False)
            try:
                found = scan(slabs, shape.slab_slots, lambda done, total: None)
            finally:
                slabs.close()
            whole = heads[: len(heads) - (len(data) % 7 > 0)]
            parsed = [parse(head.ljust(PAGE, b"\0"), MARK, 4096) for head in whole]
            good = [header for header in parsed if isinstance(header, Header)]
            newest = {header.key: header.sequence for header in sorted(good, key=lambda header: header.sequence)}
            assert {block.key: block.epoch for block in found.blocks} == newest

        yield check


@contextmanager
def _manifest() -> Iterator[Check]:
    """A store starts with whatever manifests it finds."""
    with tempfile.TemporaryDirectory() as root:
        home = Home(Path(root) / "disk")

        async def start() -> None:
            last = await home.read()
            assert isinstance(last, dict)
            found = await home.spec_of(home.space(SPEC).name)
            assert found in (None, SPEC)
            shape = await home.prepare(SPEC, 64 << 20)
            assert shape.block_bytes == SPEC.block_bytes and 1 <= shape.slab_bytes <= 64 << 20

        def check(data: bytes) -> None:
            home.space(SPEC).mkdir(exist_ok=True, mode=0o700)
            for place in (home.path, home.space(SPEC)):
                (place / "manifest.json").write_bytes(data)
            asyncio.run(start())

        try:
            yield check
        finally:
            home.close()


@contextmanager
def _records() -> Iterator[Check]:
    """The records of a file and of a batch, and the wish to cancel: read, or an OSError that names the file."""
    with tempfile.TemporaryDirectory() as root:
        home = Path(root) / "batches"

        async def read() -> None:
            async with open_directory_batches(home) as store:
                assert (await store.file("t", "file-0")) in await store.files("t")
                for batch in await store.batches("t"):
                    assert batch.shown()["object"] == "batch"
                await store.open_batches()

        def check(data: bytes) -> None:
            for kind, name in (("files", "file-0.json"), ("batches", "batch_0.json"), ("batches", "batch_0.cancel")):
                place = home / tenant_name("t") / kind
                place.mkdir(parents=True, exist_ok=True, mode=0o700)
                content = data.split(b"\n", 1)[-1][:20] if name.endswith("cancel") else data.split(b"\n", 1)[0]
                (place / name).write_bytes(content)
            asyncio.run(read())

        yield check


TOML_WORDS = (
    b"[", b"]", b"=", b'"', b"'''", b"{", b"}", b"\n", b"inf", b"nan", b"true", b"1979-05-27", b"[price.default]", b"#",
    b"[limits.a]", b"weight", b"input", b"cached", b"host", b"requests_per_minute", b"dir", b"tool_format", b'"hermes"',
)  # fmt: skip
KEY_WORDS = (b'"keys"', b'"id"', b'"sha256"', b'"tenant"', b'"role"', b'"operator"', b"a" * 64, b'"note"')
RECORD_WORDS = (b'"id"', b'"tenant"', b'"status"', b'"order"', b'"faults"', b'"usage"', b'"completed"', b"\n", b"12")


def _settings(name: str, read: Callable[[Path], object], words: tuple[bytes, ...]) -> Contract:
    return Contract(name=name, opened=partial(_file, name, read), refusals=(ConfigError,), words=words)


CONTRACTS = (
    _settings("keys", _keys, KEY_WORDS),
    _settings("terms", _terms, TOML_WORDS),
    _settings("models", _models, TOML_WORDS),
    _settings("server_key", _server_key, (b"00", b" ", b"\n", b"g")),
    Contract(name="note", opened=partial(_file, "note", _note), refusals=(), words=(b" ", b"\n")),
    Contract(name="journal", opened=partial(_file, "lines", _journal), refusals=(), words=(b"\n", b"{}")),
    Contract(name="slot", opened=plain(_slot), refusals=(), words=(b"penstokN", MARK), seconds=LOOP_S, examples=300),
    Contract(name="slab", opened=_slab, refusals=(), words=(b"penstokN", MARK)),
    Contract(
        name="manifest", opened=_manifest, refusals=(), words=(b'"spec"', b'"slab_slots"', b'"format"', b'"model"')
    ),
    Contract(name="records", opened=_records, refusals=(OSError,), words=RECORD_WORDS),
)

"""What runs the official clients, without any of them: `make test-clients` has those."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from contextlib import asynccontextmanager

import pytest
from loadtest.clients import install
from loadtest.clients.clients import CASES, CLIENTS, Client, Tried, run
from loadtest.clients.document import document
from loadtest.clients.served import Doors


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CLIENTS", str(tmp_path))
    return tmp_path


def test_every_client_has_its_environment_and_its_cases():
    assert {client.environment for client in CLIENTS if not client.peer} | {"conformance"} == set(
        install.environments()
    )
    assert all((CASES / client.file).is_file() for client in CLIENTS)


def test_no_environment_brings_a_torch():
    pins = [file.read_text() for file in install.PINS.rglob("*") if file.is_file()]
    assert len(pins) > 3 and not any(re.search(r"^torch|\"torch", text, re.MULTILINE) for text in pins)


@pytest.mark.parametrize("name", ["agents", "node", "opencode"])
def test_an_environment_counts_when_it_is_whole_and_of_the_present_pins(place, monkeypatch, name):
    done = []
    monkeypatch.setattr(install.venv, "create", lambda directory, **_: directory.mkdir())
    monkeypatch.setattr(install.subprocess, "run", lambda command, **_: done.append(command))
    assert not install.installed(name)
    (place / name / "bin").mkdir(parents=True)
    (place / name / "bin" / "python").touch()  # what is there while it is being made
    (place / name / "node_modules").mkdir()
    assert not install.installed(name)
    install.install(name)
    assert install.installed(name) and len(done) == 1
    monkeypatch.setattr(install, "_pins", lambda _: "others")
    assert not install.installed(name)


@pytest.mark.parametrize("name", ["agents", "node"])
def test_one_that_failed_leaves_nothing(place, monkeypatch, name):
    def fails(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr(install.venv, "create", lambda directory, **_: directory.mkdir())
    monkeypatch.setattr(install.subprocess, "run", fails)
    assert install.main([name]) == 1
    assert not (place / name).exists()


def test_a_client_that_is_not_installed_fails(place):
    tried = run(Client("somebody", "agents", "openai_python.py"), Doors("http://127.0.0.1:1", ""))
    assert not tried.unchanged and "loadtest.clients.install agents" in tried.cases["start"]


def test_the_table():
    works = Tried(client="one", seconds=1.0, versions={"one": "1.0"}, cases={"chat": "ok", "eight_at_once": "ok"})
    fails = Tried(client="two", seconds=1.0, note="its own way", cases={"chat": "ok", "tools": "a | b\nc"})
    text = document([works, fails], "schemathesis said so.")
    assert "1 of 2 clients work unchanged." in text
    assert "| one | one 1.0 | chat, eight at once |  |  |" in text
    assert "| two |  | chat | tools: a \\| b c | its own way |" in text
    assert text.endswith("schemathesis said so.\n")


@asynccontextmanager
async def gateway(*pages: tuple[int, int]):
    """Answers /metrics with these live and cancelled requests, one after another; the last one stays."""
    left = list(pages)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        live, cancelled = left.pop(0) if len(left) > 1 else left[0]
        page = f'penstock_requests_total{{outcome="cancelled"}} {cancelled}.0\npenstock_requests_live {live}.0\n'
        writer.write(f"HTTP/1.0 200 OK\r\ncontent-length: {len(page)}\r\n\r\n{page}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def cases_of(url, monkeypatch):
    """The module that case files share, as it would be in a client's environment."""
    monkeypatch.setenv("PENSTOCK_URL", url)
    monkeypatch.setenv("PENSTOCK_MODEL", "penstock-mini")
    spec = importlib.util.spec_from_file_location("case", CASES / "case.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GONE_S", 0.1)
    return module


async def test_a_client_that_has_left_is_one_whose_request_ended_as_cancelled(monkeypatch):
    async with gateway((0, 4), (1, 4), (0, 5)) as url:
        async with cases_of(url, monkeypatch).leaving():
            pass


@pytest.mark.parametrize(("found", "said"), [((1, 4), "1 requests are live and 0 of 1"), ((0, 4), "0 requests")])
async def test_one_that_goes_on_or_came_to_its_own_end_is_none(monkeypatch, found, said):
    async with gateway((0, 4), found) as url:
        with pytest.raises(AssertionError, match=said):
            async with cases_of(url, monkeypatch).leaving():
                pass

"""`--model ORG/NAME`: from the cache of Hugging Face models, or through the real client from a hub on 127.0.0.1."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.cli.hub import fetch, model_directory, public_name
from penstock.models import NAMES, embedded
from penstock.runtime.config import ConfigError

NAME = "some-org/tiny-model"
REVISION = "0123456789abcdef0123456789abcdef01234567"
SOURCE = embedded(NAMES[1])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def remember(cache: Path, files: tuple[str, ...] | None = None) -> Path:
    home = cache / "models--some-org--tiny-model"
    snapshot = home / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    for file in SOURCE.iterdir():
        if files is None or file.name in files:
            (snapshot / file.name).symlink_to(file)
    return snapshot


def test_a_model_in_the_cache_is_found_by_its_name(cache: Path) -> None:
    snapshot = remember(cache)
    fetch("model", NAME)  # asks nobody
    assert model_directory("model", NAME) == snapshot.resolve()
    assert public_name(NAME) == NAME


def test_directories_and_embedded_models_come_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-org").mkdir()
    (tmp_path / "some-org" / "tiny-model").symlink_to(SOURCE)
    assert model_directory("model", NAME) == SOURCE.resolve()
    assert public_name(NAME) == SOURCE.name
    assert model_directory("model", NAMES[0]) == embedded(NAMES[0]).resolve()


@pytest.mark.parametrize("name", ["nowhere", "../x/y", "/no/such", "a/b/c", ".hidden/x"])
def test_what_is_no_name_says_how_to_get_a_model(cache: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"ORG/NAME"):
        model_directory("model", name)


def test_without_the_client_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[hub\]'"):
        fetch("model", NAME)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client asks for."""

    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        type(self).asked.append(self.path)
        path = self.path.partition("?")[0]
        names = [*(file.name for file in SOURCE.iterdir()), "modeling_evil.py"]
        if path.startswith(f"/api/models/{NAME}"):
            files = [{"rfilename": name, "size": 1} for name in names]
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
            known = {"id": NAME, "modelId": NAME, "sha": REVISION, "siblings": files, "tags": [], "private": False}
            return self._send(json.dumps(tree if "/tree/" in path else known).encode(), body, {})
        prefix = f"/{NAME}/resolve/{REVISION}/"
        if path.startswith(prefix) and (SOURCE / path.removeprefix(prefix)).is_file():
            data = (SOURCE / path.removeprefix(prefix)).read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            return self._send(data, body, {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION})
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()
        return None

    def _send(self, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {"content-length": str(len(data)), "accept-ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def hub() -> Iterator[tuple[str, list[str]]]:
    handler = type("OneHub", (Hub,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.asked
        finally:
            server.shutdown()
            thread.join()


DOWNLOAD = """
from penstock.cli.hub import fetch, model_directory
fetch("model", "some-org/tiny-model")
print(model_directory("model", "some-org/tiny-model"))
"""


def test_a_model_that_is_not_here_is_downloaded_once_without_code(cache: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with hub() as (url, asked):
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
        for _ in range(2):
            before = len(asked)
            done = subprocess.run(
                [sys.executable, "-c", DOWNLOAD], capture_output=True, text=True, timeout=60, env=environment
            )
            assert done.returncode == 0, done.stderr
            found = Path(done.stdout.strip())
            assert (found / "model.safetensors").read_bytes() == (SOURCE / "model.safetensors").read_bytes()
        assert len(asked) == before, "the second time nobody is asked"
    assert found.is_relative_to(cache.resolve())
    assert not any("evil" in path for path in asked)


def test_no_network_is_said_in_one_line(cache: Path) -> None:
    pytest.importorskip("huggingface_hub")
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "up", "--model", NAME],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_XET": "1"},
    )
    assert done.returncode == 2 and done.stdout == ""
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith(f"penstock: model = '{NAME}': ") and "cannot be downloaded" in last
    assert "Traceback" not in done.stderr

"""Builds the image, brings the compose file up, serves the official client, and takes all down: `make test-containers`.

Needs root, and podman, buildah, runc, debootstrap and what a bridge network needs; on Debian:
`apt-get install --no-install-recommends podman buildah debootstrap runc netavark aardvark-dns iptables`. Nothing is
pulled: the base image is made from Debian's packages.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from openai import OpenAI

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
_BASE, _IMAGE = "localhost/debian-base", "localhost/penstock"
_NEEDED = ("podman", "buildah", "runc", "debootstrap")
_SETTINGS = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
"""Of podman: crun does not run where cgroups are mounted in both versions."""
_READY_S = 180.0


def why_not() -> str:
    """What this machine lacks; empty where containers can be tried."""
    if os.geteuid():
        return "only root may make base images"
    lacking = [name for name in _NEEDED if shutil.which(name) is None]
    return f"there is no {', '.join(lacking)}" if lacking else ""


def main() -> int:
    """Returns 0 when the client was served as it should be."""
    reason = why_not()
    if reason:
        print(f"not tried: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory) / "containers.conf"
        settings.write_text(_SETTINGS)
        port = _free_port()
        environment = {
            **os.environ,
            "CONTAINERS_CONF": str(settings),
            "STORAGE_DRIVER": "vfs",
            "PENSTOCK_PORT": str(port),
            "PENSTOCK_PID_OF_STORE": "container:penstock_kvstore_1",  # podman-compose hands the value to podman
        }
        _build(environment, Path(directory))
        compose = [sys.executable, "-m", "podman_compose", "--in-pod", "false", "--file", str(COMPOSE)]
        _run([*compose, "config"], environment, quiet=True)
        try:
            _run([*compose, "up", "--detach", "--no-build"], environment)
            key = _said([*compose, "exec", "-T", "gateway-1", "cat", "/keys/local.key"], environment)
            _serve(port, key.strip())
        except BaseException:
            subprocess.run([*compose, "logs"], env=environment, check=False)
            raise
        finally:
            subprocess.run([*compose, "down", "--volumes", "--timeout", "10"], env=environment, check=False)
        for kind in (["ps", "--all", "--format", "{{.Names}}"], ["volume", "ls", "--format", "{{.Name}}"]):
            left = [name for name in _said(["podman", *kind], environment).split() if name.startswith("penstock_")]
            assert not left, f"{left} are left"
        print("nothing is left")
    return 0


def _build(environment: Mapping[str, str], place: Path) -> None:
    """What pip needs on this host (wheels, certificates) is there while the image is made, and not in it."""
    if subprocess.run(["podman", "image", "exists", _BASE], env=environment, check=False).returncode:
        base = place / "base"
        _run(["debootstrap", "--variant=minbase", "bookworm", str(base)], environment, quiet=True)
        tar = place / "base.tar"
        _run(["tar", "-C", str(base), "-cf", str(tar), "."], environment)
        _run(["podman", "import", str(tar), _BASE], environment)
    options = ["--isolation", "chroot", "--layers", "--tag", _IMAGE, "--build-arg", f"BASE={_BASE}"]
    wheels, certificates = os.environ.get("PIP_FIND_LINKS"), os.environ.get("PIP_CERT")
    if wheels:
        options += ["--volume", f"{wheels}:/wheels:ro", "--build-arg", "PIP_FIND_LINKS=/wheels"]
    if certificates:
        options += ["--volume", f"{Path(certificates).parent}:/certificates:ro"]
        options += ["--build-arg", f"PIP_CERT=/certificates/{Path(certificates).name}"]
    _run(["buildah", "bud", *options, "--file", str(ROOT / "deploy" / "Dockerfile"), str(ROOT)], environment)


def _serve(port: int, key: str) -> None:
    """Two turns of a session; the second one finds the first one's blocks."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            if client.models.list().data[0].model_extra["ready"]:  # type: ignore[index]
                break
        except Exception as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no client was served within {_READY_S:.0f} s") from error
        time.sleep(1)
    messages = [{"role": "user", "content": "Tell me about the weather. " * 40}]
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(
            model="penstock-mini",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=32,
            extra_headers={"x-session-affinity": "a-session"},
        )
        text = answer.choices[0].message.content or ""
        assert text, "an answer has text"
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And tomorrow?"}]
    print(f"cached tokens of the two turns: {cached}")
    assert cached[1] > 100, "the second turn finds the blocks of the first"


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def _run(command: list[str], environment: Mapping[str, str], *, quiet: bool = False) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL if quiet else None)


def _said(command: list[str], environment: Mapping[str, str]) -> str:
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())

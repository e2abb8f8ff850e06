"""Podman as the container engine of `docs/containers.md`: its settings here, a base image, and a `docker` in its place.

Needs root, and podman, buildah, runc, debootstrap and what a bridge network needs; on Debian:
`apt-get install --no-install-recommends podman buildah debootstrap runc netavark aardvark-dns iptables curl`. Nothing
is pulled: the base image is made from Debian's packages.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = {"light": "localhost/penstock:light", "worker": "localhost/penstock:worker"}
"""As compose.yaml names them."""
PROJECT = "penstock"
_BASE = "localhost/debian-slim"
_NEEDED = ("podman", "runc", "debootstrap", "curl")
_SETTINGS = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
"""Of podman: crun does not run where cgroups are mounted in both versions."""
_NEVER = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")
_REMOVED = ("var/cache/apt", "var/lib/apt/lists")
"""Both are left out of the base image, as of Debian's slim ones; no package brings what is never there."""


def why_not() -> str:
    """What this machine lacks; empty where containers can be tried."""
    if os.geteuid():
        return "only root may make base images"
    lacking = [name for name in _NEEDED if shutil.which(name) is None]
    return f"there is no {', '.join(lacking)}" if lacking else ""


@contextmanager
def docker() -> Iterator[Mapping[str, str]]:
    """The environment of a shell in which `docker` and `docker compose` are podman and podman-compose."""
    with tempfile.TemporaryDirectory() as place:
        settings = Path(place) / "containers.conf"
        settings.write_text(_SETTINGS)
        environment = {
            **os.environ,
            "CONTAINERS_CONF": str(settings),
            "PATH": os.pathsep.join((place, str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "PENSTOCK_BASE": _BASE,
            "PENSTOCK_PID": f"container:{PROJECT}_host_1",  # podman-compose hands the value to podman
            "PENSTOCK_PID_2": f"container:{PROJECT}_host-2_1",
        }
        compose = shlex.join(
            [
                *(sys.executable, "-m", "podman_compose", "--in-pod", "false"),
                f"--podman-build-args={shlex.join(_of_this_host())}",
            ]
        )
        shim = Path(place) / "docker"
        shim.write_text(f'#!/bin/sh\ncase $1 in compose) shift; exec {compose} "$@" ;; *) exec podman "$@" ;; esac\n')
        shim.chmod(0o700)
        _make_base(environment)
        yield environment


def _of_this_host() -> list[str]:
    """What pip needs on this host, wheels and certificates, is there while an image is made, and not in it."""
    options = ["--isolation", "chroot"]
    if wheels := os.environ.get("PIP_FIND_LINKS"):  # has torch for a CPU
        options += ["--volume", f"{wheels}:/mirror:ro", "--build-arg", "PIP_FIND_LINKS=/mirror"]
        options += ["--build-arg", "TORCH_INDEX="]
    if certificates := os.environ.get("PIP_CERT"):
        options += ["--volume", f"{Path(certificates).parent}:/certificates:ro"]
        options += ["--build-arg", f"PIP_CERT=/certificates/{Path(certificates).name}"]
    return options


def _make_base(environment: Mapping[str, str]) -> None:
    if subprocess.run(["podman", "image", "exists", _BASE], env=environment, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as place:
        base, tar = Path(place) / "base", Path(place) / "base.tar"
        run(["debootstrap", "--variant=minbase", "bookworm", str(base)], environment, quiet=True)
        excluded = [f"path-exclude=/{path}/*" for path in _NEVER]
        (base / "etc/dpkg/dpkg.cfg.d/slim").write_text("\n".join(excluded) + "\n")
        for path in (*_NEVER, *_REMOVED):
            shutil.rmtree(base / path, ignore_errors=True)
            (base / path).mkdir()
        run(["tar", "-C", str(base), "-cf", str(tar), "."], environment)
        run(["podman", "import", str(tar), _BASE], environment, quiet=True)


def build(environment: Mapping[str, str]) -> None:
    """Builds the images, one after the other: what one has built the next ones share."""
    compose = ["docker", "compose", "--file", str(ROOT / "deploy" / "compose.yaml")]
    run([*compose, "build"], {**environment, "COMPOSE_PARALLEL_LIMIT": "1"}, quiet=True)


def run(command: list[str], environment: Mapping[str, str], *, quiet: bool = False) -> None:
    """Runs a command, which has to succeed, and says which."""
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL if quiet else None)


def said(command: list[str], environment: Mapping[str, str]) -> str:
    """What a command, which has to succeed, prints."""
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

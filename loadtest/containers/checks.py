"""Looks at a mesh of containers that runs: healthy, hardened, light, and mapping the store's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from loadtest.containers.engine import PROJECT, said

_HEALTHY = ("redis", "router", "kvstore", "draft", "prefill", "decode", "gateway")
_HEALTHY_S = 60.0
_LIGHT = ("router", "kvstore", "gateway")
_WORKERS = ("draft", "prefill", "decode")
_KERNELS = (
    "from penstock.engine.kernels.cpu import build; build.library(); print(build.present().parent == build.PREBUILT)"
)


def main() -> int:
    """Returns 0; else an assertion says what is wrong."""
    environment = dict(os.environ)
    for service in _HEALTHY:
        _wait_for_health(service, environment)
    for service in (*_LIGHT, *_WORKERS):
        _check_hardened(service, environment)
    for service in _LIGHT:
        assert _inside(service, "python -c 'import torch'", environment), f"torch is in the image of {service}"
    for service in _WORKERS:
        assert _inside(service, "command -v gcc || command -v g++ || command -v cc", environment), "there is a compiler"
        kernels = said(["podman", "exec", _name(service), "python", "-c", _KERNELS], environment)
        assert kernels.strip() == "True", "the kernels are those of the image"
        attached = [line for line in _lines(service, environment) if line.get("event") == "attached to the store"]
        assert attached and all(line["mapped"] for line in attached), f"{service} streams: {attached}"
    print("healthy, hardened, light; the store's memory is mapped")
    return 0


def _wait_for_health(service: str, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _HEALTHY_S
    while True:
        command = ["podman", "healthcheck", "run", _name(service)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return
        reason = f"{service} is not healthy: {done.stdout}{done.stderr}"
        print(reason, file=sys.stderr)
        assert time.monotonic() < deadline, reason
        time.sleep(1)


def _check_hardened(service: str, environment: Mapping[str, str]) -> None:
    assert said(["podman", "exec", _name(service), "id", "-u"], environment).strip() == "10001"
    assert _inside(service, "touch /opt/penstock/x || touch /x", environment), f"{service} can write to its image"
    status = said(["podman", "exec", _name(service), "cat", "/proc/self/status"], environment)
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapBnd"], 16) == 0 and fields["NoNewPrivs"] == "1", f"{service} may do more than it needs"


def _name(service: str) -> str:
    return f"{PROJECT}_{service}_1"


def _inside(service: str, command: str, environment: Mapping[str, str]) -> int:
    return _status(["podman", "exec", _name(service), "sh", "-c", command], environment)


def _status(command: list[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode


def _lines(service: str, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The log of a service, as far as it is JSON."""
    done = subprocess.run(
        ["podman", "logs", _name(service)], env=environment, check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]


if __name__ == "__main__":
    sys.exit(main())

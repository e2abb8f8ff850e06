"""Rendered manifests, as the tests look at them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.decode.config import DecodeConfig
from penstock.draft.config import DraftConfig
from penstock.gateway.config import GatewayConfig
from penstock.kvstore.config import KvStoreConfig
from penstock.picker.config import PickerConfig
from penstock.prefill.config import PrefillConfig
from penstock.router.config import RouterConfig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "penstock"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

Manifest = dict[str, Any]
CONFIGS: dict[str, Any] = {
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "kvstore": KvStoreConfig,
    "draft": DraftConfig,
    "picker": PickerConfig,
}


def program(name: str) -> str:
    """Where it is; `make tools` puts it beside the interpreter. Skips the test where it is not."""
    found = shutil.which(name, path=_PATH)
    if found is None:
        pytest.skip(f"{name} is not there; `make tools` installs it")
    return found


def run(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """What a program says; it may fail."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **more)


def render(*arguments: str) -> list[Manifest]:
    """What the chart gives for the release `penstock` in the namespace `penstock`."""
    command = [program("helm"), "template", "penstock", str(CHART), "--namespace", "penstock", *arguments]
    rendered = run(*command)
    assert rendered.returncode == 0, rendered.stderr
    return list(parse(rendered.stdout))


def parse(text: str) -> Iterator[Manifest]:
    """The documents of a stream."""
    yield from (one for one in yaml.safe_load_all(text) if one)


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> dict[str, Manifest]:
    """By name."""
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] in kinds}


@dataclass(frozen=True)
class Pod:
    """One pod of a workload."""

    name: str
    workload: Manifest
    spec: Manifest
    labels: Mapping[str, str]

    @property
    def containers(self) -> list[Manifest]:
        """In the order of their start."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """By name."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each["ports"]}


def pods(manifests: Sequence[Manifest]) -> dict[str, Pod]:
    """The first pod of each workload, by the workload's name."""
    found = {}
    for name, one in of_kind(manifests, "Deployment", "StatefulSet").items():
        template = one["spec"]["template"]
        found[name] = Pod(f"{name}-0", one, template["spec"], template["metadata"]["labels"])
    return found


def service_of(container: Manifest) -> str:
    """Of a container that runs `python -m penstock.SERVICE`."""
    python, option, module = container["command"]
    assert (python, option) == ("python", "-m")
    return str(module).removeprefix("penstock.")


def flags(container: Manifest) -> dict[str, str]:
    """The settings of a command line, without dashes in front."""
    return dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])


def check_schemas(manifests: list[Manifest], of_others: set[str]) -> None:
    """Each manifest is what the schemas of Kubernetes say, with nothing beside it."""
    judge = pytest.importorskip("kubernetes_validate", reason="`make tools` installs it")
    unknown = set()
    for one in manifests:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                judge.validate(one, "1.37", strict=True)
        except judge.SchemaNotFoundError:
            unknown.add(one["kind"])
    assert unknown == of_others

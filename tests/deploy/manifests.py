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
from penstock.stage.config import StageConfig

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
    "stage": StageConfig,
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
    for name, one in of_kind(manifests, "Deployment", "StatefulSet", "LeaderWorkerSet").items():
        for workload, pod, template in templates(name, one):
            found[workload] = Pod(pod, one, template["spec"], template["metadata"]["labels"])
    return found


def templates(name: str, workload: Manifest) -> Iterator[tuple[str, str, Manifest]]:
    """Of each kind of pod a name, that of the first pod, and the template."""
    if workload["kind"] != "LeaderWorkerSet":
        yield name, f"{name}-0", workload["spec"]["template"]
        return
    group = workload["spec"]["leaderWorkerTemplate"]
    yield name, f"{name}-0", group["leaderTemplate"]
    yield f"{name}-stage", f"{name}-0-1", group["workerTemplate"]


def service_of(container: Manifest) -> str:
    """Of a container that runs `python -m penstock.SERVICE`."""
    python, option, module = container["command"]
    assert (python, option) == ("python", "-m")
    return str(module).removeprefix("penstock.")


def flags(container: Manifest) -> dict[str, str]:
    """The settings of a command line, without dashes in front."""
    return dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])


def as_pods(template: Manifest) -> Manifest:
    """A template of pods by itself."""
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "template"}, "template": template}


def check_schemas(manifests: list[Manifest], of_others: set[str]) -> None:
    """Each manifest is what the schemas of Kubernetes say, with nothing beside it; of others' kinds the pods are."""
    judge = pytest.importorskip("kubernetes_validate", reason="`make tools` installs it")
    unknown = set()
    groups = of_kind(manifests, "LeaderWorkerSet")
    for one in [*manifests, *(as_pods(template) for name in groups for *_, template in templates(name, groups[name]))]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                judge.validate(one, "1.37", strict=True)
        except judge.SchemaNotFoundError:
            unknown.add(one["kind"])
    assert unknown == of_others

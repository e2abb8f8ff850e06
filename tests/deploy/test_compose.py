"""The compose file names settings that there are, and opens one port, on this host alone."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.decode.config import DecodeConfig
from penstock.draft.config import DraftConfig
from penstock.gateway.config import GatewayConfig
from penstock.kvstore.config import KvStoreConfig
from penstock.prefill.config import PrefillConfig
from penstock.router.config import RouterConfig

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CONFIGS = {
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "kvstore": KvStoreConfig,
    "draft": DraftConfig,
}


def test_every_part_of_a_mesh_is_there() -> None:
    kinds = sorted(re.sub(r"-\d$", "", name) for name in SERVICES)
    assert kinds == sorted([*CONFIGS, "gateway", "router", "redis", "keys"])


def test_one_port_is_published_on_this_host_alone() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) == 1
    assert published[0].startswith("127.0.0.1:")
    assert all(service.get("network_mode") != "host" for service in SERVICES.values())


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in ("redis", "keys")])
def test_settings_exist(name: str) -> None:
    service = SERVICES[name]
    kind = re.sub(r"-\d$", "", name)
    assert service["command"][:3] == ["python", "-m", f"penstock.{kind}"]
    known = {field.name for field in fields(CONFIGS[kind])} | _engine(kind)
    prefix = f"PENSTOCK_{kind.upper()}_"
    named = [one.removeprefix(prefix).lower() for one in service.get("environment", {}) if one.startswith(prefix)]
    named += [one[2:].replace("-", "_") for one in service["command"] if one.startswith("--")]
    assert named, "the mesh needs more than defaults"
    assert set(named) <= known


def _engine(kind: str) -> set[str]:
    """Settings that workers have from elsewhere."""
    return {"model", "kvstore", "host_id"} if kind in ("prefill", "decode") else set()


def test_what_is_copied_into_the_image_is_let_into_the_build() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= let_in
    assert all((ROOT / name).exists() for name in copied)

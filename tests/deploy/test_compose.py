"""The compose file names settings that there are, trusts nobody more than it has to, and opens one port, on this host
alone; the Dockerfile leaves the compiler behind."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from loadtest.containers.run import DOCUMENT, blocks, commands
from tests.deploy.manifests import CONFIGS, ROOT

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name in SERVICES if name.split("-")[0] in CONFIGS]
STAGES = re.split(r"(?m)^(?=FROM )", (DEPLOY / "Dockerfile").read_text())[1:]
DEFAULTS = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (DEPLOY / "compose.yaml").read_text()))


def kind(name: str) -> str:
    return name.split("-")[0]


def test_up_without_a_profile_is_one_of_each_part() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        *(CONFIGS.keys() - {"picker", "stage"}),  # for an Envoy of one's own, and for further hosts
        "redis",
        "keys",
        "host",
    }
    assert {profile for service in SERVICES.values() for profile in service.get("profiles", ())} == {
        "gpu",
        "observability",
        "two-hosts",
    }


def test_one_port_is_published_on_this_host_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert [name for name in published if "profiles" not in SERVICES[name]] == ["gateway"]
    for ports in published.values():
        assert len(ports) == 1 and ports[0].startswith("127.0.0.1:")
    assert not any("network_mode" in service for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_nobody_may_do_more_than_it_has_to(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged") and "user" not in service, "the images have a user that is not root"


@pytest.mark.parametrize("name", OURS)
def test_settings_exist(name: str) -> None:
    service = SERVICES[name]
    assert service["command"][:3] == ["python", "-m", f"penstock.{kind(name)}"]
    known = {field.name for field in fields(CONFIGS[kind(name)])} | _engine(kind(name))
    prefix = f"PENSTOCK_{kind(name).upper()}_"
    environment = service["environment"]
    named = [one.removeprefix(prefix).lower() for one in environment if one.startswith(prefix)]
    assert [one for one in environment if not one.startswith(prefix)] == ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    named += [one[2:].replace("-", "_") for one in service["command"] if one.startswith("--")]
    assert named, "the mesh needs more than defaults"
    assert set(named) <= known


def _engine(service: str) -> set[str]:
    """Settings that workers have from elsewhere."""
    return {"model", "kvstore", "host_id", "device"} if service in ("prefill", "decode") else set()


@pytest.mark.parametrize("name", OURS)
def test_health_is_asked_where_the_service_listens(name: str) -> None:
    test = SERVICES[name]["healthcheck"]["test"]
    assert test[:4] == ["CMD", "python", "-m", "penstock.rpc.probe"]
    command, environment = SERVICES[name]["command"], SERVICES[name]["environment"]
    grpc = environment.get("PENSTOCK_GATEWAY_GRPC_ADDRESS") or command[command.index("--address") + 1]
    assert test[4:] == [grpc]
    assert grpc.startswith(f"{SERVICES[name].get('hostname')}:") or name == "gateway"


@pytest.mark.parametrize("name", OURS)
def test_a_service_starts_when_those_that_it_needs_are_healthy(name: str) -> None:
    needed = SERVICES[name]["depends_on"]
    assert needed, "something is needed"
    for other, how in needed.items():
        if other == "keys":
            assert how["condition"] == "service_completed_successfully"
        elif other == "host" or other.startswith("host-") or other == "draft":
            assert how["condition"] == "service_started"
        else:
            assert how["condition"] == "service_healthy" and "healthcheck" in SERVICES[other]


@pytest.mark.parametrize("name", [name for name in OURS if kind(name) in ("prefill", "decode", "draft")])
def test_a_worker_sees_the_processes_of_its_store(name: str) -> None:
    """The store's memory is opened as /proc/PID/fd/N, and mapped only where both have one host id."""
    prefix = f"PENSTOCK_{kind(name).upper()}"
    environment = SERVICES[name]["environment"]
    store = SERVICES[environment[f"{prefix}_KVSTORE"].split(":")[0]]
    assert SERVICES[name]["pid"] == store["pid"]
    assert environment[f"{prefix}_HOST_ID"] == store["environment"]["PENSTOCK_KVSTORE_HOST_ID"]
    owner = re.sub(r".*service:|\}", "", store["pid"])
    assert SERVICES[owner]["command"] == ["python", "-m", "penstock.runtime.first"], "it outlives the store"
    assert owner in SERVICES[name]["depends_on"]


def test_light_services_have_the_light_image() -> None:
    for name in OURS:
        image = SERVICES[name]["image"]
        light = kind(name) in ("gateway", "router", "kvstore")
        assert ("light" in image) == light, name
    built = {service["image"]: service["build"] for service in SERVICES.values() if "build" in service}
    assert built.keys() == {SERVICES[name]["image"] for name in [*OURS, "redis"]}
    for image, build in built.items():
        extras = build["args"].get("EXTRAS", "")
        assert ("engine" in extras) == ("worker" in image or "cuda" in image)


def test_volumes_are_named_and_what_is_mounted_exists() -> None:
    used = set()
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).is_dir()
                assert volume.endswith(":ro")
            else:
                used.add(source)
    assert used == COMPOSE["volumes"].keys()


def test_the_example_of_settings_has_all_with_their_defaults() -> None:
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    given = dict(line.removeprefix("# ").split("=", 1) for line in lines if re.match(r"(# )?\w+=", line))
    assert given.keys() == DEFAULTS.keys()
    ours = {name: value for name, value in given.items() if not name.startswith("PENSTOCK_PID")}
    assert ours == {name: DEFAULTS[name] for name in ours}


def test_images_of_others_have_a_version() -> None:
    images = [service["image"] for service in SERVICES.values()]
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images if not image.startswith("${"))


def test_prometheus_asks_every_service_where_it_tells() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    [names] = job["dns_sd_configs"]
    assert names["names"] == [name for name in names["names"] if name in SERVICES]
    assert set(names["names"]) == set(OURS)
    for name in OURS:
        address = SERVICES[name]["environment"][f"PENSTOCK_{kind(name).upper()}_METRICS_ADDRESS"]
        assert address == f"0.0.0.0:{names['port']}"


def test_grafana_finds_its_sources_and_boards_where_they_are_mounted() -> None:
    provisioning = DEPLOY / "grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/penstock.yaml").read_text())["datasources"]
    assert {re.sub(r"https?://|:\d+", "", source["url"]) for source in sources} <= SERVICES.keys()
    [boards] = yaml.safe_load((provisioning / "dashboards/penstock.yaml").read_text())["providers"]
    assert f"./grafana/boards:{boards['options']['path']}:ro" in SERVICES["grafana"]["volumes"]


def test_what_is_copied_into_the_image_is_let_into_the_build() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if re.match(r"COPY (?!--from)", line) for name in line.split()[1:-1]}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= let_in
    assert all((ROOT / name).exists() for name in copied)


def test_the_last_stage_has_no_compiler_and_no_root() -> None:
    stages = {(re.search(r"AS (\w+)", stage) or ["", "last"])[1]: stage for stage in STAGES}
    assert "g++" in stages["compiler"] and "FROM compiler AS wheel" in stages["wheel"]
    for name in ("base", "redis", "root", "last"):
        assert not re.search(r"g\+\+|gcc|clang|build-essential|python3-dev", stages[name]), name
    assert re.findall(r"(?:FROM |--from=)(\w+)", stages["last"]) == ["scratch", "root", "installed"]
    assert stages["root"].startswith("FROM base ")
    users = [line.split()[1] for name in ("redis", "last") for line in stages[name].splitlines() if "USER" in line]
    assert users == ["redis", "penstock"]


def test_the_wheel_is_built_once_for_all_images() -> None:
    stages = [stage for stage in STAGES if "pip wheel" in stage or "$PIP wheel" in stage]
    assert len(stages) == 1 and "EXTRAS" not in stages[0], "what depends on no argument is cached"
    assert any("kernels.cpu.build --all" in stage for stage in STAGES)


def test_every_command_of_the_page_is_run(tmp_path: Path) -> None:
    document = DOCUMENT.read_text()
    assert not re.search(r"```(?!sh\n|python\n|\n)", document), "other code would not be run"
    script = commands(document, tmp_path, 1234)
    lines = [line for text in blocks(document, "sh") for line in text.splitlines()]
    for line in lines:
        start = line.replace(":8000", ":1234").split("turn.py")[0].removeprefix("python ")
        assert start in script
    assert (tmp_path / "turn.py").exists()
    assert "127.0.0.1:1234" in (tmp_path / "turn.py").read_text()
    assert script.count("loadtest.containers.checks") == 1

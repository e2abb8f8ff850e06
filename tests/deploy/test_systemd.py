"""The units are what systemd takes, and the configuration is one that services take."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.deploy.manifests import CONFIGS as ALL
from tests.deploy.manifests import ROOT, run
from tests.deploy.processes import ask, free_net, processes

import penstock.models
from penstock.gateway.accounts.keys import new_key, write_keys
from penstock.runtime.config import service_app

SYSTEMD = ROOT / "deploy" / "systemd"
INSTANCES = {
    "router": "1",
    "kvstore": "1",
    "prefill": "1",
    "decode": "1",
    "draft": "1",
    "stage": "7300",
    "gateway": "8080",
}
CONFIGS = {kind: config for kind, config in ALL.items() if kind in INSTANCES}
_STRICTEST = 2.5
"""Most exposure that `systemd-analyze security` may find, of 10; the unit of most daemons has 9."""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What the script installs, below a directory."""
    subprocess.run([SYSTEMD / "install"], env={**os.environ, "DESTDIR": str(tmp_path)}, check=True)
    return tmp_path


def unit(kind: str) -> dict[str, list[str]]:
    """The settings of a unit, by name."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / f"penstock-{kind}@.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_there_is_a_unit_for_each_service() -> None:
    assert {re.split(r"[-@]", path.name)[1] for path in SYSTEMD.glob("*.service")} == set(CONFIGS)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_finds_nothing_to_complain_of(installed: Path) -> None:
    units = installed / "etc/systemd/system"
    for path in units.glob("*.service"):
        path.write_text(path.read_text().replace("/opt/penstock/bin/python", sys.executable))
    names = [f"penstock-{kind}@{instance}.service" for kind, instance in INSTANCES.items()]
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"}
    checked = run("systemd-analyze", "verify", *names, "penstock.target", env=environment)
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "penstock" in line]) == (0, [])
    judged = run(
        *("systemd-analyze", "security", "--offline=yes", f"--threshold={int(10 * _STRICTEST)}"),
        *(f"--root={installed}", "--no-pager", *names),
    )
    assert judged.returncode == 0, judged.stdout


def test_a_configuration_that_is_there_is_left(installed: Path) -> None:
    mine = installed / "etc/penstock/penstock.toml"
    assert mine.read_text() == (SYSTEMD / "penstock.toml").read_text()
    mine.write_text("[router]\n")
    subprocess.run([SYSTEMD / "install"], env={**os.environ, "DESTDIR": str(installed)}, check=True)
    assert mine.read_text() == "[router]\n"


@pytest.mark.parametrize("kind", CONFIGS)
def test_services_take_the_configuration(
    kind: str, installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command line of the unit, with the file that is installed and the environment of the unit."""
    config = installed / "etc/penstock/penstock.toml"
    models = penstock.models.embedded("penstock-mini").parent
    config.write_text(config.read_text().replace("/srv/models", str(models)).replace("20GiB", "1GiB"))
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    for variable in unit(kind)["Environment"]:
        name, _, value = variable.partition("=")
        if name.startswith(f"PENSTOCK_{kind.upper()}_"):
            monkeypatch.setenv(name, value.replace("%d", str(tmp_path)))
    python, option, module, *arguments = unit(kind)["ExecStart"][0].replace("%i", INSTANCES[kind]).split()
    assert (python, option, module) == ("/opt/penstock/bin/python", "-m", f"penstock.{kind}")
    made: list[object] = []
    service_app(kind, made.append, CONFIGS[kind])(arguments, result_action="return_value")
    [settings] = made
    given = tomllib.loads(config.read_text())[kind]
    assert getattr(settings, "drain_s", 0) == given.get("drain_s", 0)
    assert float(unit(kind)["TimeoutStopSec"][0]) >= given.get("drain_s", 0) + 15
    if kind == "gateway":
        assert settings.http_address == "127.0.0.1:8080"  # type: ignore[attr-defined]
    elif kind == "stage":
        assert settings.address == "127.0.0.1:7300"  # type: ignore[attr-defined]
    else:
        assert settings.address == f"unix:/run/penstock/{kind}-1"  # type: ignore[attr-defined]
    assert "PENSTOCK_CONFIG=/etc/penstock/penstock.toml" in unit(kind)["Environment"]


def test_units_that_share_memory_see_each_other() -> None:
    """A user namespace of its own, or a user of its own, would keep a worker from the store's memory."""
    for kind in ("kvstore", "prefill", "decode"):
        assert not {"PrivateUsers", "DynamicUser", "PrivatePIDs"} & set(unit(kind))
        assert unit(kind)["User"] == ["penstock"] and unit(kind)["ProtectProc"] == ["invisible"]


def test_sockets_are_where_no_other_user_comes() -> None:
    """All units make the directory, and none takes it away from the others."""
    for kind in CONFIGS:
        found = {name: value for name, value in unit(kind).items() if name.startswith("RuntimeDirectory")}
        assert found == {
            "RuntimeDirectory": ["penstock"],
            "RuntimeDirectoryMode": ["0700"],
            "RuntimeDirectoryPreserve": ["yes"],
        }
    config = tomllib.loads((SYSTEMD / "penstock.toml").read_text())
    addresses = {value for table in config.values() for name, value in table.items() if name in ("router", "kvstore")}
    assert addresses == {f"unix:/run/penstock/{kind}-1" for kind in ("router", "kvstore")}


def test_services_say_that_they_are_ready_and_turn() -> None:
    for kind in CONFIGS:
        assert unit(kind)["Type"] == ["notify"] and unit(kind)["WatchdogSec"] == ["30"]
        assert unit(kind)["Restart"] == ["always"] and unit(kind)["WantedBy"] == ["penstock.target"]


def hear_of(inlet: socket.socket, services: int) -> None:
    """Returns when so many services have said that they are ready."""
    inlet.settimeout(60)
    while services:
        services -= inlet.recv(64) == b"READY=1"


async def test_the_units_of_a_host_are_a_mesh(installed: Path) -> None:
    """Started in the wrong order, with the file that is installed; systemd hears from each when it is ready."""
    etc, address = installed / "etc/penstock", f"{free_net()}.1"
    models = penstock.models.embedded("penstock-mini").parent
    sockets = installed / "run"
    given = {
        "127.0.0.1": address,
        "/srv/models": str(models),
        "/etc/penstock": str(etc),
        "/run/penstock": str(sockets),
    }
    text = (etc / "penstock.toml").read_text().replace('"/var/lib/', f'"{installed}/var/lib/')
    for written, meant in given.items():
        text = text.replace(written, meant)
    (etc / "penstock.toml").write_text(text.replace("20GiB", "1GiB"))
    (installed / "var/lib/penstock").mkdir(parents=True)  # as StateDirectory= does
    (installed / "var/lib/penstock-gateway").mkdir()
    sockets.mkdir(mode=0o700)  # as RuntimeDirectory= does
    key, entry = new_key("me")
    write_keys(etc / "keys.json", [entry])
    (etc / "server.key").write_text("00" * 32)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inlet:
        inlet.bind(str(installed / "notify"))
        environment = {
            **os.environ,
            "PENSTOCK_CONFIG": str(etc / "penstock.toml"),
            "PENSTOCK_GATEWAY_SERVER_KEY_FILE": str(etc / "server.key"),
            "NOTIFY_SOCKET": str(installed / "notify"),
        }
        kinds = [kind for kind in reversed(INSTANCES) if kind not in ("draft", "stage")]
        async with processes() as started:
            for kind in kinds:
                _, _, module, *arguments = unit(kind)["ExecStart"][0].replace("%i", INSTANCES[kind]).split()
                await started.start(module, arguments, given, environment)
            url = f"http://{address}:8080"
            await started.until_ready(url)
            answer = await ask(url, {"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            await asyncio.to_thread(hear_of, inlet, len(kinds))
            shown = await asyncio.to_thread(
                run, sys.executable, "-m", "penstock.cli", *f"ctl top --json --router unix:{sockets}/router-1".split()
            )
            assert shown.returncode == 0, shown.stderr
            assert f"{sockets}/decode-1" in shown.stdout and f"{sockets}/prefill-1" in shown.stdout
            await started.end()

"""The commands of docs/kubernetes.md and docs/systemd.md: those that need no cluster and no systemd are run, of the
others what they name is looked up."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.deploy.manifests import ROOT, Manifest, flags, of_kind, parse, pods, program, render, run

from penstock.gateway.accounts.keys import read_keys

CLI = [sys.executable, "-m", "penstock.cli"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    return [shlex.split(line) for line in lines]


def test_the_pages_have_commands() -> None:
    assert len(commands("kubernetes.md")) > 10 and len(commands("systemd.md")) > 10


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the commands read."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    return tmp_path


def ours(command: list[str], checkout: Path) -> list[str] | None:
    """The command as it is run here; None: it needs a cluster."""
    match command:
        case ["helm", "install", *rest]:
            return [program("helm"), "template", *(one for one in rest if one != "--create-namespace")]
        case ["helm", ("lint" | "template"), *_] | ["kubectl", "kustomize", *_]:
            return [program(command[0]), *command[1:]]
        case ["kubectl", "apply", "--kustomize", folder]:
            return [program("kubectl"), "kustomize", folder]
        case ["penstock", *rest]:
            return [*CLI, *rest]
        case ["openssl", *_]:
            return [*command]
        case _:
            return None


def test_what_needs_no_cluster_runs(checkout: Path) -> None:
    ran = []
    for command in commands("kubernetes.md"):
        here = ours(command, checkout)
        if here is None:
            continue
        here, into = (here[: here.index(">")], here[-1]) if ">" in here else (here, "")
        done = run(*here, cwd=checkout)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        if into:
            (checkout / into).write_text(done.stdout)
        elif command[1] in ("install", "template", "kustomize", "apply"):
            assert len(list(parse(done.stdout))) > 10
        ran.append(command[0])
    assert {"helm", "kubectl", "penstock", "openssl"} == set(ran)
    assert len(read_keys(checkout / "keys.json")) == 1


def test_what_needs_one_names_what_is_there() -> None:
    manifests = render()
    for command in commands("kubernetes.md"):
        if command[0] != "kubectl" or command[1] != "--namespace":
            continue
        assert command[2] == "penstock"
        match command[3:]:
            case ["wait" | "port-forward", *rest]:
                [named] = [one for one in rest if "/" in one]
                check_named(manifests, *named.split("/"))
            case ["get", kind, name, *_]:
                check_named(manifests, kind, name)
            case ["exec", pod, "--", "penstock", *asked]:
                router = pods(manifests)[pod.removesuffix("-0")]
                gateway = pods(manifests)["penstock-gateway"].containers[0]
                assert router.workload["kind"] == "StatefulSet"
                assert asked[asked.index("--router") + 1] in flags(gateway)["router"].split(",")
                helped = run(*CLI, *asked[:2], "--help")
                assert helped.returncode == 0
            case ["create", "secret", *_]:
                assert {"keys.json", "server.key"} <= set(command)
            case rest:
                pytest.fail(f"nobody looks at {rest}")


def check_named(manifests: list[Manifest], kind: str, name: str) -> None:
    kinds = {"deployment": "Deployment", "service": "Service", "secret": "Secret"}
    found = of_kind(manifests, kinds[kind])[name]
    assert kind != "secret" or "client.key" in found["data"]
    assert kind != "service" or [port["port"] for port in found["spec"]["ports"] if port["name"] == "http"] == [80]


def test_values_of_the_page_render(tmp_path: Path) -> None:
    for number, block in enumerate(blocks("kubernetes.md", "yaml")):
        values = tmp_path / f"{number}.yaml"
        values.write_text(block)
        assert yaml.safe_load(block)
        rendered = render("--values", str(values))
        if "nodes:" in block:
            assert {"penstock-large", "penstock-large-stage"} < set(pods(rendered))
        elif "pools" in block:
            assert set(pods(rendered)) == {"penstock-gateway", "penstock-router", "penstock-node"}
        else:
            mounts = [one for pod in pods(rendered).values() for one in pod.spec["volumes"] if one["name"] == "weights"]
            assert len(mounts) == 3


def test_the_commands_of_a_host(checkout: Path) -> None:
    """Below a directory: what they write is there, and what systemd is told to start has a unit."""
    (checkout / "etc/penstock").mkdir(parents=True)
    units = {path.name for path in (ROOT / "deploy/systemd").iterdir()}
    config = tomllib.loads((ROOT / "deploy/systemd/penstock.toml").read_text())
    for command in commands("systemd.md"):
        match [one for one in command if one not in ("sudo", "-u", "penstock")]:
            case ["deploy/systemd/install"]:
                run("deploy/systemd/install", cwd=checkout, env={**os.environ, "DESTDIR": str(checkout)})
                assert (checkout / "etc/systemd/system/penstock.target").exists()
            case ["/opt/penstock/bin/penstock", "keys", *rest]:
                assert run(*CLI, "keys", *below(checkout, rest)).returncode == 0
            case ["sh", "-c", script]:
                subprocess.run(["sh", "-c", *below(checkout, [script])], check=True)
            case ["chmod", *rest]:
                subprocess.run(["chmod", *below(checkout, rest)], check=True)
            case ["systemctl", "enable", *names]:
                assert {re.sub(r"@\d+$", "@.service", name) for name in names} <= units
                sockets = [f"unix:/run/{name.replace('-', '/', 1).replace('@', '-')}" for name in names if "@" in name]
                assert config["decode"]["router"] == config["gateway"]["router"] == sockets[0]
                assert config["decode"]["kvstore"] == config["prefill"]["kvstore"] == sockets[1]
            case ["/opt/penstock/bin/pip", "install", "--constraint", path, wanted]:
                extras = re.findall(r"\w+", wanted)
                known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                assert (ROOT / path).exists() and set(extras) <= set(known)
            case ["ln", "-s", _, "/srv/models"]:
                [line] = [
                    line for block in blocks("systemd.md", "sh") for line in block.splitlines() if "ln -s" in line
                ]
                line = line.removeprefix("sudo ").replace("/opt/penstock/bin/python", sys.executable)
                subprocess.run(["sh", "-c", line.replace("/srv/models", str(checkout / "models"))], check=True)
                wanted_models = {Path(config["decode"]["model"]).name, Path(config["draft"]["model"]).name}
                assert wanted_models <= set(os.listdir(checkout / "models"))
            case ["/opt/penstock/bin/penstock", "ctl", *rest]:
                assert run(*CLI, "ctl", rest[0], "--help").returncode == 0  # run by test_systemd, where there is a mesh
            case ["python3", "-m", "venv", _] | ["systemd-sysusers"] | ["systemctl", "start", _] | ["chgrp", *_]:
                pass
            case rest:
                pytest.fail(f"nobody looks at {rest}")
    etc = checkout / "etc/penstock"
    assert len(read_keys(etc / "keys.json")) == 1 and (etc / "keys.json").stat().st_mode & 0o777 == 0o640
    assert len(bytes.fromhex((etc / "server.key").read_text().strip())) == 32
    assert (etc / "server.key").stat().st_mode & 0o77 == 0


def below(checkout: Path, arguments: list[str]) -> list[str]:
    return [argument.replace("/etc/", f"{checkout}/etc/") for argument in arguments]

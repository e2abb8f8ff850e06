"""The command line from outside: what it refuses, and how."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.cli import mesh
from penstock.cli.mesh import DemoOptions, MeshOptions, MeshPlan, plan_mesh
from penstock.cli.ports import PortTaken, reserved_ports
from penstock.cli.redis_server import own_redis
from penstock.cli.supervisor import Patience
from penstock.cli.view import View
from penstock.engine.config import EngineSettings
from penstock.models import NAMES, embedded
from penstock.rpc.channels import open_channels
from penstock.rpc.server import LIVE, serve
from penstock.runtime import cores
from penstock.runtime.addresses import HostPort
from penstock.runtime.config import ConfigError
from penstock.runtime.ports import SOCKETS
from penstock.testing.adapters import write_adapter
from penstock.testing.checkpoints import write_checkpoint
from penstock.testing.heads import write_head

SERVING = health_pb2.HealthCheckResponse.SERVING


def penstock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_help_names_every_command() -> None:
    done = penstock("--help", COLUMNS="200")
    assert done.returncode == 0
    for command in (
        "up",
        "demo",
        "bench",
        "load",
        "ctl",
        "scale",
        "models",
        "plan",
        "gateway",
        "router",
        "prefill",
        "decode",
        "kvstore",
        "draft",
        "picker",
    ):
        assert f" {command} " in done.stdout


def test_grpc_is_imported_when_its_fork_handlers_are_off() -> None:
    """They run in children that uvloop forks, and can end them."""
    program = (
        "import os, sys; from penstock.cli.__main__ import main, make_app; make_app();"
        "assert 'grpc' not in sys.modules;"
        "sys.argv = ['penstock', '--version']\n"
        "try: main()\n"
        "finally: assert os.environ['GRPC_ENABLE_FORK_SUPPORT'] == '0'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_service_command_is_the_service() -> None:
    done = penstock("router", "--help", COLUMNS="200")
    assert "--max-live-plans" in done.stdout
    done = penstock("router", "--max-live-plans", "0")
    assert done.returncode != 0
    assert "max_live_plans = 0: must be more than 0" in done.stderr


def test_help_has_the_name_of_the_command_and_sizes() -> None:
    assert "Usage: penstock gateway " in penstock("gateway", "--help", COLUMNS="200").stdout
    assert "[default: 1GiB]" in penstock("up", "--help", COLUMNS="300").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("penstock-mini",), "did you mean `penstock up --model penstock-mini`?"),
        (("--model", "nowhere"), "ORG/NAME"),
        (("--host", "0.0.0.0"), "must be 127.0.0.1 unless api-keys is set"),
        (("--api-keys", "keys.json"), "server_key_file"),
        (("--hots", "x"), "Did you mean --host?"),
    ],
)
def test_what_newcomers_try_is_answered(arguments: tuple[str, ...], says: str) -> None:
    done = penstock("up", *arguments, COLUMNS="200")
    assert done.returncode != 0 and done.stdout == ""
    assert says in done.stderr


def test_the_gateway_gets_the_settings_of_its_doors(tmp_path: Path) -> None:
    options = MeshOptions(
        host="0.0.0.0",
        port=0,
        api_keys=tmp_path / "keys",
        server_key_file=tmp_path / "key",
        tls_cert=tmp_path / "cert",
        tls_key=tmp_path / "its-key",
        cors_origins=("https://a.example", "https://b.example"),
        tool_format="kimi",
        batch_store=str(tmp_path / "batches"),
    )
    with reserved_ports() as ports:
        plan = plan_mesh(options, ports)
    command = next(child.command for child in plan.children if child.name == "gateway")
    given = " ".join(command)
    assert plan.url.startswith("https://127.0.0.1:") and plan.grpc.startswith("127.0.0.1:")
    assert "--http-address 0.0.0.0:" in given and "--grpc-address 0.0.0.0:" in given
    assert f"--api-keys {tmp_path}/keys --server-key-file {tmp_path}/key" in given
    assert f"--tls-cert {tmp_path}/cert --tls-key {tmp_path}/its-key" in given
    assert "--cors-origins https://a.example --cors-origins https://b.example" in given
    assert "--tool-format kimi" in given
    assert f"--batch-store {tmp_path}/batches" in given
    others = [child.command for child in plan.children if child.name != "gateway"]
    assert not any("0.0.0.0" in argument for command in others for argument in command)


def test_a_taken_port_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = penstock("up", "--port", str(port))
    assert done.returncode == 2
    assert f"port = {port}" in done.stderr
    assert "choose another" in done.stderr
    assert done.stdout == ""


def test_a_wrong_model_directory_is_said_within_a_second(tmp_path: Path) -> None:
    """Of computing: that nothing is loaded or started first is the point, not how busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = penstock("up", "--port", "0", "--model", str(tmp_path))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1


@pytest.mark.parametrize(
    ("arguments", "field", "possible"),
    [
        (("--kv-host-bytes", "2XB"), "--kv-host-bytes", "512MiB"),
        (("--kv-host-bytes", "900TiB"), "--kv-host-bytes", "of memory; use less"),
        (("--kv-host-bytes", "5"), "--kv-host-bytes", "at least 64KiB"),
        (("--kv-host-bytes", "64KiB"), "--kv-host-bytes", "16 blocks of this model"),
        (("--kv-nvme-dir", "{here}/new", "--kv-nvme-bytes", "100KiB"), "--kv-nvme-bytes", "16 blocks of this model"),
        (("--seal", "on"), "seal", "needs server-key-file"),
        (("--kv-nvme-dir", "{here}"), "--kv-nvme-bytes", "for example 20GiB"),
        (("--kv-nvme-bytes", "2GiB"), "--kv-nvme-dir", "give the directory"),
        (("--kv-nvme-dir", "{here}/new", "--kv-nvme-bytes", "900TiB"), "--kv-nvme-bytes", "there is room for"),
        (("--kv-nvme-dir", "{here}", "--kv-nvme-bytes", "1"), "--kv-nvme-bytes", "at least 64KiB"),
        (("--kv-nvme-dir", "{here}/file/x", "--kv-nvme-bytes", "1MiB"), "--kv-nvme-dir", "is not a directory"),
        (("--kv-nvme-dir", "{here}", "--kv-nvme-bytes", "much"), "--kv-nvme-bytes", "512MiB"),
        (("--kv-gpu-bytes", "900TiB"), "--kv-gpu-bytes", "GPU has|no CUDA device"),
        (("--kv-gpu-bytes", "-1"), "--kv-gpu-bytes", ""),
    ],
)
@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_tier_that_can_not_be_is_said_before_anything_starts(
    command: str, arguments: tuple[str, ...], field: str, possible: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = penstock(command, *(one.format(here=tmp_path) for one in arguments), COLUMNS="300")
    said = " ".join((done.stderr + done.stdout).split())
    assert done.returncode == 2
    assert field in said
    assert re.search(possible, said)
    assert "Traceback" not in said
    assert "kvstore" not in said, "no child was started"
    assert [file.name for file in tmp_path.iterdir()] == ["file"], "nothing was made"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--decode", "0"), "decode"),
        (("--port", "70000"), "port"),
        (("--dtype", "int3"), "dtype"),
        (("--kv-dtype", "int3"), "kv_dtype"),
        (("--kv-host-bytes", "lots"), "kv-host-bytes"),
    ],
)
def test_a_wrong_option_is_named(arguments: tuple[str, ...], field: str) -> None:
    done = penstock("up", *arguments)
    assert done.returncode != 0
    assert field in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_kv_of_another_type_is_every_workers() -> None:
    with reserved_ports() as ports:
        options = MeshOptions(port=0, prefill=1, engine=EngineSettings(kv_dtype="int8"), decode=2)
        children = plan_mesh(options, ports).children
        commands = {child.name: " ".join(child.command) for child in children}
    asked = {name for name, command in commands.items() if command.count("--kv-dtype int8")}
    assert asked == {"prefill-0", "decode-0", "decode-1"}


async def test_reserved_ports_can_be_listened_on_again_and_again_but_not_taken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with reserved_ports() as ports:
        addresses = {ports.reserve() for _ in range(20)}
        assert len(addresses) == 20
        address = addresses.pop()
        with pytest.raises(PortTaken):
            ports.reserve(address.port)
        with pytest.raises(ConfigError, match="cannot listen there"):
            async with serve(address, lambda server: None, []):
                pass
        for name, value in ports.environment.items():
            monkeypatch.setenv(name, value)
        for _ in range(2):
            async with serve(address, lambda server: None, []) as server:
                assert server.port == address.port
            with socket.socket() as stranger, pytest.raises(OSError):
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                stranger.bind((address.host, address.port))
    with socket.create_server(("127.0.0.1", 0)) as other, reserved_ports() as ports, pytest.raises(PortTaken):
        ports.reserve(other.getsockname()[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_take_a_reserved_port() -> None:
    with reserved_ports() as ports:
        address = ports.reserve()
        stranger = os.fork()
        if stranger == 0:
            os.setuid(65534)
            taken = 0
            for options in (
                (),
                (socket.SO_REUSEADDR,),
                (socket.SO_REUSEPORT,),
                (socket.SO_REUSEADDR, socket.SO_REUSEPORT),
            ):
                with socket.socket() as one, suppress(OSError):
                    for option in options:
                        one.setsockopt(socket.SOL_SOCKET, option, 1)
                    one.bind((address.host, address.port))
                    taken += 1
            os._exit(taken)
        assert os.waitpid(stranger, 0)[1] == 0


def _inside(plan: MeshPlan) -> set[str]:
    """Addresses at which services listen for each other."""
    return {
        child.command[child.command.index("--address") + 1] for child in plan.children if "--address" in child.command
    }


def test_services_reach_each_other_over_sockets_of_one_user() -> None:
    options = MeshOptions(port=0, prefill=1, routers=2)
    with reserved_ports() as ports:
        plan = plan_mesh(options, ports)
        inside, directory = _inside(plan), Path(plan.router.removeprefix("unix:")).parent
        assert inside == {
            f"unix:{directory}/{name}"
            for name in ("prefill-0", "decode-0", "draft-0", "router-0", "router-1", "kvstore")
        }
        assert directory.stat().st_mode & 0o777 == 0o700
        assert plan.url.startswith("http://127.0.0.1:"), "clients use ports"
        assert all(child.environment[SOCKETS] == str(directory) for child in plan.children)
    assert not directory.exists()
    with reserved_ports() as ports:
        assert all(map(HostPort, _inside(plan_mesh(replace(options, sockets="tcp"), ports))))


@pytest.mark.attack
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_reaches_no_socket() -> None:
    with reserved_ports() as ports, socket.socket(socket.AF_UNIX) as router:
        path = ports.socket("router-0").path
        router.bind(path)
        router.listen()
        os.chmod(path, 0o777)  # as an umask of 0 would have it: the directory is what guards it
        stranger = os.fork()
        if stranger == 0:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as one:
                try:
                    one.connect(path)
                except PermissionError:
                    os._exit(0)
                os._exit(1)
        assert os.waitpid(stranger, 0)[1] == 0


async def test_a_socket_that_was_left_behind_is_listened_on_again() -> None:
    with reserved_ports() as ports:
        address = ports.socket("router-0")
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(address.path)
        async with serve(address, lambda server: None, []), open_channels() as channels:
            stub = health_pb2_grpc.HealthStub(channels.to(address, "router"))
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=LIVE))).status == SERVING


@pytest.mark.parametrize("runtime", ["/" + "d" * 80, "relative", "/nowhere/at/all"])
def test_sockets_lie_where_their_paths_are_short_enough(monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    with reserved_ports() as ports:
        assert not ports.socket("kvstore").path.startswith(runtime)


def names(**options: object) -> list[str]:
    with reserved_ports() as ports:
        return [child.name for child in plan_mesh(MeshOptions(port=0, **options), ports).children]  # type: ignore[arg-type]


def test_the_processes_of_a_mesh() -> None:
    assert names(prefill=1) == ["prefill-0", "decode-0", "draft", "router", "kvstore", "gateway"]
    assert names(prefill=2, decode=3, draft="none") == [
        *("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"),
        *("router", "kvstore", "gateway"),
    ]
    assert names(aggregated=True, prefill=2, draft="penstock-mini-draft") == [
        "decode-0",
        "draft",
        "router",
        "kvstore",
        "gateway",
    ]


@pytest.mark.parametrize(
    ("found", "options", "workers", "note"),
    [
        (2, {}, ["decode-0"], "one worker is prefill and decode: on 2 cores two would wait"),
        (3, {}, ["decode-0"], "on 3 cores"),
        (6, {}, ["prefill-0", "decode-0"], "workers of their own; --aggregated makes them one"),
        (5, {"decode": 2}, ["decode-0", "decode-1"], "on 5 cores"),
        (8, {"decode": 2}, ["prefill-0", "decode-0", "decode-1"], "workers of their own"),
        (64, {"engine": EngineSettings(device="cuda")}, ["decode-0"], "on one device two would wait"),
        (64, {"engine": EngineSettings(device="cuda", tp=2)}, ["decode-0"], "on the same devices two would wait"),
        (2, {"prefill": 1}, ["prefill-0", "decode-0"], ""),
        (64, {"aggregated": True}, ["decode-0"], ""),
    ],
)
def test_the_machine_decides_whether_prefill_has_workers_of_its_own(
    monkeypatch: pytest.MonkeyPatch, found: int, options: dict[str, Any], workers: list[str], note: str
) -> None:
    _machine(monkeypatch, found)
    with reserved_ports() as ports:
        plan = plan_mesh(MeshOptions(port=0, **options), ports)
    assert _workers(plan) == workers
    assert note in plan.note and bool(note) == bool(plan.note) and "measured" not in plan.note
    roles = {child.command[child.command.index("--role") + 1] for child in plan.children if "--role" in child.command}
    assert roles == {"decode" if "prefill-0" in workers else "both"}


@pytest.mark.parametrize(
    ("found", "threads", "options", "groups"),
    [
        (4, 1, {}, [(0, 1), (2, 3)]),
        (5, 1, {}, [(0, 1), (2, 3)]),
        (6, 2, {}, [(0, 1), (2, 3)]),
        (10, 2, {}, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (6, 1, {"decode": 2}, [(0, 1), (2, 3), (4, 5)]),
    ],
)
@pytest.mark.parametrize("pace", [0.9, 0.55])
def test_the_machine_measures_where_the_number_of_cores_does_not_decide(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: int,
    threads: int,
    options: dict[str, Any],
    groups: list[tuple[int, ...]],
    pace: float,
) -> None:
    _machine(monkeypatch, found)
    monkeypatch.setattr(cores, "_CORES", _topology(tmp_path, found, threads))
    asked = []
    monkeypatch.setattr(mesh, "pace_beside", lambda cores: asked.append(cores) or pace)
    with reserved_ports() as ports:
        plan = plan_mesh(MeshOptions(port=0, **options), ports)
    assert asked == [groups]
    assert ("prefill-0" in _workers(plan)) == (pace == 0.9)
    assert f"measured: side by side they compute at {pace:.0%} of their pace alone" in plan.note


def test_what_can_not_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cores: object) -> float:
        raise OSError("no more processes")

    _machine(monkeypatch, 4)
    monkeypatch.setattr(mesh, "pace_beside", broken)
    with reserved_ports() as ports:
        plan = plan_mesh(MeshOptions(port=0), ports)
    assert _workers(plan) == ["decode-0"]
    assert "two would wait for each other (it could not be measured: no more processes); --prefill 1" in plan.note


def _machine(monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    """This process may run on so many cores, none of which shares anything with another one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(found)))
    monkeypatch.setattr(cores, "_quota", lambda _: None)
    monkeypatch.setattr(cores, "_CORES", Path("/nowhere"))


def _topology(root: Path, found: int, threads: int) -> Path:
    """A system's list of cores, of which so many at a time are threads of one."""
    for core in range(found):
        file = root / f"cpu{core}" / "topology" / "core_cpus_list"
        file.parent.mkdir(parents=True)
        first = core // threads * threads
        file.write_text(f"{first}-{first + threads - 1}\n")
    return root


def _workers(plan: MeshPlan) -> list[str]:
    return [child.name for child in plan.children if child.name[-1].isdigit()]


def test_without_drafts_there_is_no_memory_for_theirs() -> None:
    with reserved_ports() as ports:
        plan = plan_mesh(MeshOptions(port=0, draft="none"), ports)
    [store] = [child.command for child in plan.children if child.name == "kvstore"]
    assert "--draft-bytes" not in store


def test_several_models_have_workers_of_their_own_and_a_share_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(14)))
    monkeypatch.setattr(cores, "_quota", lambda _: None)
    other = tmp_path / "other"
    shutil.copytree(embedded(NAMES[0]), other)
    options = MeshOptions(port=0, prefill=1, decode=2, models=(str(other), NAMES[0]))
    assert options.names == ("other", NAMES[0])
    with reserved_ports() as ports:
        commands = {child.name: child.command for child in plan_mesh(options, ports).children}

    def said(name: str, setting: str) -> str:
        return commands[name][commands[name].index(setting) + 1]

    workers = ["prefill-0", "decode-0", "decode-1", "prefill-1", "decode-2", "decode-3"]
    assert list(commands) == [*workers, "draft-1", "router", "kvstore", "gateway"]
    assert [said(name, "--model-name") for name in workers] == ["other"] * 3 + [NAMES[0]] * 3
    assert [said(name, "--model") for name in workers] == [str(other)] * 3 + [str(embedded(NAMES[0]))] * 3
    assert {said(name, "--draft") for name in workers[:3]} == {"none"}
    assert {said(name, "--draft") for name in workers[3:]} == {said("draft-1", "--address")}
    assert [said(name, "--cores") for name in workers] == ["0,1", "2,3", "4,5", "6,7", "8,9", "10,11"]
    assert len({said(name, "--address") for name in commands if name != "gateway"}) == len(commands) - 1
    assert said("kvstore", "--partitions") == "2"
    assert (said("gateway", "--model-name"), said("gateway", "--model-dir")) == ("other", str(other))
    assert said("gateway", "--also") == f"{NAMES[0]}={embedded(NAMES[0])}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", NAMES[0], "--model", NAMES[0]), "clients ask by name, and two would be 'penstock-mini'"),
        (("--model", NAMES[0], "--model", "/nowhere"), "is no directory and no embedded model"),
        (("--model", NAMES[0], "--model", NAMES[1], "--kv-host-bytes", "3MiB"), "16 blocks of this model"),
    ],
)
def test_models_that_can_not_be_served_together(arguments: tuple[str, ...], says: str) -> None:
    done = penstock("up", "--port", "0", *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_the_demo_shows_the_hand_off_on_every_machine() -> None:
    with reserved_ports() as ports:
        plan = plan_mesh(DemoOptions(), ports)
    assert [child.name for child in plan.children][:2] == ["prefill-0", "decode-0"] and not plan.note


def test_several_routers_and_gateways_know_each_other_and_share_a_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_GATEWAY_LEDGER", "mine.db")
    with reserved_ports() as ports:
        options = MeshOptions(port=0, prefill=1, routers=2, gateways=3)
        plan = plan_mesh(options, ports, redis="unix:///r.sock")
    by_name = {child.name: child for child in plan.children}
    assert {"router-0", "router-1", "gateway-0", "gateway-1", "gateway-2"} <= by_name.keys()

    def said(name: str, option: str) -> str:
        command = by_name[name].command
        return command[command.index(option) + 1]

    routers = [said(f"router-{number}", "--address") for number in range(2)]
    for name in ("prefill-0", "decode-0", "kvstore", "gateway-0", "gateway-2"):
        assert said(name, "--router") == ",".join(routers)
    assert said("gateway-1", "--router") == ",".join(reversed(routers)), "another router is the first"
    assert [said(f"router-{n}", "--name") for n in range(2)] == ["router-0", "router-1"]
    assert {said(f"router-{n}", "--state") for n in range(2)} == {"unix:///r.sock"}
    assert [plan.url, *plan.others] == [f"http://{said(f'gateway-{n}', '--http-address')}" for n in range(3)]
    environment = by_name["gateway-1"].environment
    assert environment["PENSTOCK_GATEWAY_RESPONSES_STORE"] == "unix:///r.sock"
    assert environment["PENSTOCK_GATEWAY_ANSWER_STORE"] == "unix:///r.sock"
    assert "PENSTOCK_GATEWAY_LEDGER" not in environment, "it has one already"


async def test_a_missing_redis_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="redis = True: needs the program redis-server"):
        async with own_redis(View("warning"), Patience()):
            pass


def test_everybody_is_told_the_same_addresses() -> None:
    with reserved_ports() as ports:
        plan = plan_mesh(MeshOptions(port=0, prefill=1), ports)
    commands = {child.name: child.command for child in plan.children}

    def option(name: str, flag: str) -> str:
        return commands[name][commands[name].index(flag) + 1]

    for name in ("prefill-0", "decode-0", "kvstore", "gateway"):
        assert option(name, "--router") == option("router", "--address")
    for name in ("prefill-0", "decode-0", "draft"):
        assert option(name, "--kvstore") == option("kvstore", "--address")
    assert (option("kvstore", "--host-bytes"), option("kvstore", "--draft-bytes")) == ("1GiB", "128MiB")
    for name in ("prefill-0", "decode-0"):
        assert option(name, "--model-name") == option("gateway", "--model-name") == "penstock-mini"
    assert option("decode-0", "--draft") == option("draft", "--address")
    assert option("draft", "--device") == option("decode-0", "--device")
    assert plan.url == f"http://{option('gateway', '--http-address')}"


@pytest.mark.parametrize(("given", "share"), [(0.25, "0.25"), (1.0, "0.5")])
def test_a_tenants_share_holds_in_the_store_and_in_workers(tmp_path: Path, given: float, share: str) -> None:
    """A half where there are tenants and nothing is said."""
    keys = {} if given < 1 else {"api_keys": tmp_path / "keys", "server_key_file": tmp_path / "key"}
    with reserved_ports() as ports:
        options = MeshOptions(port=0, prefill=1, engine=EngineSettings(tenant_share=given), **keys)
        children = plan_mesh(options, ports).children
    told = {child.name: child.command for child in children if "--tenant-share" in child.command}
    assert set(told) == {"prefill-0", "decode-0", "kvstore"}
    assert {line[line.index("--tenant-share") + 1] for line in told.values()} == {share}


def test_workers_are_told_their_threads_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "_quota", lambda _: None)

    def told(**options: object) -> dict[str, tuple[str, ...]]:
        with reserved_ports() as ports:
            plan = plan_mesh(MeshOptions(port=0, **options), ports)  # type: ignore[arg-type]
        commands = {child.name: child.command for child in plan.children}
        return {name: line[line.index("--threads") :][:4] for name, line in commands.items() if "-0" in name}

    assert told() == {
        "prefill-0": ("--threads", "3", "--cores", "0,1,2"),
        "decode-0": ("--threads", "3", "--cores", "3,4,5"),
    }
    assert {line[:2] for line in told(engine=EngineSettings(threads=5)).values()} == {("--threads", "5")}
    assert not any("--cores" in line for line in told(engine=EngineSettings(threads=5)).values())


def test_workers_are_told_their_device() -> None:
    with reserved_ports() as ports:
        plan = plan_mesh(MeshOptions(port=0, prefill=1, engine=EngineSettings(device="cuda:1", dtype="float8")), ports)
    for child in plan.children[:2]:
        line = child.command
        assert line[line.index("--device") + 1] == "cuda:1" and line[line.index("--dtype") + 1] == "float8"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "gpu"}, "device = 'gpu': must be cpu, cuda, or cuda and its number"),
        ({"dtype": "float8"}, "dtype = 'float8': needs a CUDA device"),
        ({"dtype": "bfloat16", "weights": "lossless", "device": "cuda"}, "weights = 'lossless': needs device cpu"),
    ],
)
def test_devices_that_are_none(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineSettings(**options)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_worker_says_that_there_is_no_such_device() -> None:
    done = penstock("decode", "--model", str(embedded(NAMES[0])), "--device", "cuda:99")
    assert done.returncode == 1
    assert "device = 'cuda:99'" in done.stderr and "Traceback" not in done.stderr


def test_cores_that_are_none_are_refused_by_a_worker() -> None:
    for wrong in ("one", "4000"):
        arguments = ("--model", str(embedded(NAMES[0])), "--cores", wrong)
        done = penstock("decode", *arguments)
        assert done.returncode == 1
        assert f"cores = {wrong!r}" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_store_is_told_its_tiers(tmp_path: Path) -> None:
    given = {"kv_host_bytes": 8 << 20, "kv_nvme_dir": tmp_path / "kv", "kv_nvme_bytes": 9 << 20}
    with reserved_ports() as ports:
        told = {
            child.name: child.command
            for options in (MeshOptions(port=0, **given), MeshOptions(port=0))  # type: ignore[arg-type]
            for child in plan_mesh(options, ports).children
        }
        with_disk = next(
            c.command for c in plan_mesh(MeshOptions(port=0, **given), ports).children if c.name == "kvstore"
        )  # type: ignore[arg-type]
    tiers = (
        "--host-bytes",
        "8MiB",
        "--draft-bytes",
        "1MiB",
        "--nvme-dir",
        str(tmp_path / "kv"),
        "--nvme-bytes",
        "9MiB",
    )
    assert with_disk[-8:] == tiers
    assert told["kvstore"][-4:] == ("--host-bytes", "1GiB", "--draft-bytes", "128MiB")


@pytest.mark.parametrize(
    ("given", "sealed"),
    [
        ({}, False),
        ({"server_key_file": "key"}, False),
        ({"disk": True}, False),
        ({"server_key_file": "key", "disk": True}, True),
        ({"server_key_file": "key", "disk": True, "seal": "off"}, False),
        ({"server_key_file": "key", "seal": "on"}, True),
    ],
)
def test_blocks_are_sealed_where_there_is_a_key_and_a_disk(tmp_path: Path, given: dict[str, Any], sealed: bool) -> None:
    disk = {"kv_nvme_dir": tmp_path / "kv", "kv_nvme_bytes": 9 << 20} if given.pop("disk", False) else {}
    if "server_key_file" in given:
        given["server_key_file"] = tmp_path / "key"
    with reserved_ports() as ports:
        children = plan_mesh(MeshOptions(port=0, **given, **disk), ports).children
    told = {child.name.split("-")[0]: "--seal" in child.command for child in children}
    assert told == dict.fromkeys(told, False) | dict.fromkeys({"decode", "draft"}, sealed)


def test_a_draft_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with reserved_ports() as ports, pytest.raises(ConfigError, match="draft"):
        plan_mesh(MeshOptions(port=0, draft=str(tmp_path)), ports)


def test_a_draft_with_other_tokens_is_refused_with_the_difference(tmp_path: Path) -> None:
    draft = str(write_checkpoint(tmp_path / "draft"))
    with reserved_ports() as ports, pytest.raises(ConfigError, match=r"draft = .*' is token \d+ of the draft and"):
        plan_mesh(MeshOptions(port=0, draft=draft), ports)


def test_a_draft_head_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}')
    options = MeshOptions(port=0, engine=EngineSettings(draft_head=str(tmp_path)))
    with reserved_ports() as ports, pytest.raises(ConfigError, match=r"draft_head = .*hidden_size is 64"):
        plan_mesh(options, ports)


def test_a_draft_head_is_for_workers_that_decode_the_first_model(tmp_path: Path) -> None:
    shutil.copytree(embedded(NAMES[0]), tmp_path / "other")
    head, tiny = write_head(tmp_path / "head"), write_checkpoint(tmp_path / "tiny")
    two = (str(tiny), str(tmp_path / "other"))
    engine = EngineSettings(draft_head=str(head))
    with reserved_ports() as ports:
        children = plan_mesh(MeshOptions(port=0, models=two, prefill=1, decode=2, engine=engine), ports).children
    told = {child.name: child.command[-2:] for child in children if "--draft-head" in child.command}
    assert told == dict.fromkeys(("decode-0", "decode-1"), ("--draft-head", str(head)))


def test_a_draft_head_guesses_in_the_draft_service_where_that_is_said(tmp_path: Path) -> None:
    head, tiny = write_head(tmp_path / "head"), write_checkpoint(tmp_path / "tiny")
    engine = EngineSettings(draft_head=str(head), draft_head_in="service")
    with reserved_ports() as ports:
        options = MeshOptions(port=0, models=(str(tiny),), prefill=1, engine=engine)
        children = {child.name: child.command for child in plan_mesh(options, ports).children}
        draft, decode = children["draft"], children["decode-0"]
        assert draft[draft.index("--model") :][:4] == ("--model", str(tiny), "--head", str(head))
        assert decode[decode.index("--draft") + 1] == draft[draft.index("--address") + 1]
        assert decode[decode.index("--draft-head-in") + 1] == "service" and decode[-2:] == ("--draft-head", str(head))
        prefill = children["prefill-0"]
        assert "--draft-head" not in prefill and prefill[prefill.index("--draft") + 1] == "none"
        with pytest.raises(ConfigError, match=r"draft = .*must be none, or the address"):
            plan_mesh(replace(options, draft=str(tiny)), ports)


def test_a_draft_service_that_runs_already(tmp_path: Path) -> None:
    """It drafts for the first model; the second one has its own."""
    shutil.copytree(embedded(NAMES[0]), tmp_path / "other")
    two = (str(tmp_path / "other"), NAMES[0])
    with reserved_ports() as ports:
        options = MeshOptions(port=0, models=two, prefill=1, draft="127.0.0.1:7000")
        children = {child.name: child.command for child in plan_mesh(options, ports).children}
    decode = [command[command.index("--draft") + 1] for name, command in children.items() if "decode" in name]
    drafts = [command[command.index("--address") + 1] for name, command in children.items() if "draft" in name]
    assert len(decode) == 2 and decode[0] == "127.0.0.1:7000" and decode[1:] == drafts


def test_the_draft_follows_the_model() -> None:
    assert MeshOptions().draft_of(0) == "penstock-mini-draft"
    assert MeshOptions(models=("/some/where",)).draft_of(0) == "none"
    assert MeshOptions(models=("/some/where",)).names == ("where",)
    assert MeshOptions(draft="/a/draft").draft_of(0) == "/a/draft"
    both = MeshOptions(models=("/some/where", "penstock-mini"))
    assert [both.draft_of(0), both.draft_of(1)] == ["none", "penstock-mini-draft"]
    none = MeshOptions(models=("/some/where", "penstock-mini"), draft="none")
    assert [none.draft_of(0), none.draft_of(1)] == ["none", "none"]
    own = MeshOptions(models=("/some/where", "penstock-mini"), draft="/a/draft")
    assert [own.draft_of(0), own.draft_of(1)] == ["/a/draft", "penstock-mini-draft"], "it has the tokens of the first"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("/nowhere",), "directory = '/nowhere': is no directory and no embedded model"),
        (("--draft", "/nowhere"), "draft = '/nowhere': is no directory and no embedded model"),
        (("--kinds", "L4"), "L4"),
        (("--count", "0"), "count = 0: must be at least 1"),
        (
            ("--url", "http://127.0.0.1:1", "--count", "1", "--kinds", "L1"),
            "the evaluation broke off: Connection error",
        ),
    ],
)
def test_what_can_not_be_evaluated_is_said_at_once(arguments: tuple[str, ...], says: str) -> None:
    done = penstock("models", "eval", *arguments, COLUMNS="200")
    said = done.stderr + done.stdout
    assert done.returncode != 0 and says in " ".join(said.split())
    assert "Traceback" not in said and "tool_exact" not in said


def test_models_has_the_commands_that_train_and_the_one_that_measures() -> None:
    shown = penstock("models", "--help", COLUMNS="200").stdout
    assert all(f" {command} " in shown for command in ("train", "head", "eval"))


def test_adapters_are_those_of_the_first_model(tmp_path: Path) -> None:
    other, adapter = tmp_path / "other", tmp_path / "adapter"
    shutil.copytree(embedded(NAMES[0]), other)
    write_adapter(adapter, other)
    settings = EngineSettings(lora=(f"one={adapter}", f"two={adapter}"), max_loras=3)
    options = MeshOptions(port=0, aggregated=True, models=(str(other), NAMES[0]), draft="none", engine=settings)
    with reserved_ports() as ports:
        first, second, *_ = (child.command for child in plan_mesh(options, ports).children)
        assert [first[at + 1] for at, word in enumerate(first) if word == "--lora"] == [
            f"one={adapter}",
            f"two={adapter}",
        ]
        assert "--lora" not in second
        assert first[first.index("--max-loras") + 1] == second[second.index("--max-loras") + 1] == "3"
        wrong = replace(options, engine=EngineSettings(lora=(f"one={tmp_path}",)))
        with pytest.raises(ConfigError, match=r"lora = 'one=.*adapter_config\.json: the file is missing"):
            plan_mesh(wrong, ports)

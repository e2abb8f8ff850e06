"""A setting is declared once, in the engine's settings, and is a worker's option, variable and key in the file."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.cli.mesh import MeshOptions
from penstock.decode.config import DecodeConfig
from penstock.engine.config import EngineConfig, EngineSettings
from penstock.prefill.config import PrefillConfig
from penstock.runtime.config import ConfigError, arguments, service_app

HIDDEN = {"kernels", "stages_apart", "shared_pages", "pages_apart", "one_device", "stall_s", "again_s"}
OPTIONS = [field.name for field in fields(EngineSettings) if field.name not in HIDDEN]


def settled(config_type, *line):
    """The configuration that a service gets from its command line."""
    got = []
    app = service_app("decode", got.append, config_type)
    app(line, result_action="return_value", exit_on_error=False, print_error=False)
    return got[0]


@pytest.fixture(autouse=True)
def nothing_around(tmp_path, monkeypatch):
    """No file, no variables."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("config_type", [PrefillConfig, DecodeConfig])
def test_a_worker_takes_its_engines_settings_from_the_line_the_environment_and_the_file(
    config_type, tmp_path, monkeypatch
):
    (tmp_path / "penstock.toml").write_text('[decode]\nmax_running = 7\nmodel = "/file"\nblock_size = 8\n')
    monkeypatch.setenv("PENSTOCK_DECODE_BLOCK_SIZE", "32")
    monkeypatch.setenv("PENSTOCK_DECODE_PACKED_BYTES", "2GiB")
    config = settled(config_type, "--itl-target-ms", "0", "--threads", "0", "--kv-dtype", "", "--model", "/line")
    assert config.engine == EngineConfig(
        Path("/line"), itl_target_ms=0, max_running=7, block_size=32, packed_bytes=2 << 30
    )
    assert config.engine.itl_target_s is None


def test_defaults_are_what_they_were():
    engine = settled(DecodeConfig, "--model", "/m").engine
    assert (engine.dtype, engine.kv_dtype, engine.device, engine.weights) == ("auto", "", "cpu", "auto")
    assert (engine.block_size, engine.kv_pool_tokens, engine.max_batch_tokens) == (16, 32768, 512)
    assert (engine.itl_target_ms, engine.itl_target_s, engine.threads) == (50.0, 0.05, 0)
    assert (engine.max_running, engine.max_waiting, engine.max_model_len) == (64, 256, 0)
    assert (engine.packed_bytes, engine.draft_tokens, engine.draft_timeout_s) == (16 << 30, 16, 0.05)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("dtype", "int3", "dtype = 'int3': must be auto, float32, bfloat16, int8, int4 or float8"),
        ("kv_dtype", "int4", "kv_dtype = 'int4': must be float32, bfloat16 or int8"),
        ("weights", "gzip", "weights = 'gzip': must be auto, plain or lossless"),
        ("threads", -1, "threads = -1: must be 0 to 1024"),
        ("max_model_len", -1, "max_model_len = -1: must be 0 or more"),
        ("itl_target_ms", float("nan"), "itl_target_ms = nan: must be 0 or more"),
        ("tenant_share", 0.0, "tenant_share = 0.0: must be 0.01 to 1"),
        ("draft_tokens", 33, "draft_tokens = 33: must be 0 to 32"),
        ("draft_timeout_s", 0.0, "draft_timeout_s = 0.0: must be more than 0"),
        ("max_batch_tokens", 63, "max_batch_tokens = 63: must be at least max_running, 64"),
    ],
)
def test_one_rule_for_the_engine_a_worker_and_the_mesh(option, value, says):
    line = (f"--{option.replace('_', '-')}", str(value))
    for refused in (
        lambda: EngineSettings(**{option: value}),
        lambda: settled(DecodeConfig, "--model", "/m", *line),
        lambda: settled(MeshOptions, *line),
    ):
        with pytest.raises((ConfigError, SystemExit)) as caught:
            refused()
        assert says in str(caught.value)


@pytest.mark.parametrize("config_type", [PrefillConfig, DecodeConfig, MeshOptions])
def test_help_has_every_setting_with_its_meaning(config_type, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        service_app("decode", print, config_type)(["--help"])
    said = capsys.readouterr().out
    for option in OPTIONS:
        [line] = [line for line in said.splitlines() if f"--{option.replace('_', '-')} " in line]
        assert f"PENSTOCK_DECODE_{option.upper()}" in line and "default: " in line
        assert len(line.split()) > 8, "it says what it is"
    assert not any(f"--{option.replace('_', '-')} " in said for option in HIDDEN)


def test_settings_travel_to_another_process():
    told = EngineSettings(dtype="bfloat16", kv_pool_tokens=64, itl_target_ms=0, draft_always=True)
    line = list(arguments(told, always=("device",)))
    assert line[:4] == ["--dtype", "bfloat16", "--device", "cpu"]
    assert settled(DecodeConfig, "--model", "/m", *line).engine == EngineConfig(
        Path("/m"), dtype="bfloat16", kv_pool_tokens=64, itl_target_ms=0, draft_always=True
    )
    assert settled(MeshOptions, *line).engine == told
    always = list(arguments(EngineSettings(), always=("draft_always",)))
    assert settled(MeshOptions, *always).engine == EngineSettings()


def test_the_settings_need_no_torch():
    program = "import sys; sys.modules['torch'] = None; import penstock.engine.config, penstock.worker.config"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", ["prefill", "decode", "draft"])
def test_a_command_line_without_a_model_is_told_so(service):
    """In a process of its own: cyclopts checks differently where pydantic was imported."""
    program = (
        "import sys\n"
        "from penstock.runtime.config import service_app\n"
        f"from penstock.{service}.config import {service.capitalize()}Config as config\n"
        f"service_app({service!r}, print, config)(sys.argv[1:])\n"
    )
    for line in ((), ("--address", "127.0.0.1:0"), ("--dtype", "bfloat16")):
        done = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True, timeout=60)
        said = done.stdout + done.stderr
        assert done.returncode != 0 and "model" in said and "Traceback" not in said, said


@pytest.mark.parametrize(("option", "value"), [("router", "nowhere"), ("kvstore", "a:b"), ("draft", "1:2:3")])
def test_an_address_that_is_none_is_refused(option, value):
    with pytest.raises(ConfigError, match=f"{option} = '{value}': write host:port"):
        DecodeConfig(engine=EngineConfig(Path("/m")), **{option: value})

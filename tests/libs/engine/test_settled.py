"""What `auto` means for a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.checkpoint import EMBEDDING, inspect
from penstock.engine.checks import settled
from penstock.engine.config import EngineConfig, EngineSettings
from penstock.engine.engine import Engine
from penstock.models import embedded
from penstock.runtime.config import ConfigError


@pytest.mark.parametrize(("own", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "bfloat16")])
def test_the_dtype_is_the_checkpoints_own(tiny, own, dtype):
    found = inspect(tiny)
    stored = {name: replace(info, dtype=own) for name, info in found.tensors.items()}
    checkpoint = replace(found, tensors=stored)
    engine = settled(EngineSettings(), checkpoint)
    assert (engine.dtype, engine.kv, engine.identity) == (dtype, dtype, dtype)
    assert settled(engine, checkpoint) == engine
    said = settled(EngineSettings(dtype="int8", kv_dtype="float32"), checkpoint)
    assert (said.dtype, said.kv) == ("int8", "float32")


def test_what_does_not_go_with_it_is_named(tiny):
    assert inspect(tiny).tensors[EMBEDDING].dtype == "F32"
    with pytest.raises(ConfigError, match="weights = 'lossless': needs dtype bfloat16, not float32"):
        settled(EngineSettings(weights="lossless"), inspect(tiny))


def test_int4_is_for_a_cpu():
    with pytest.raises(ConfigError, match="dtype = 'int4': needs device cpu, not cuda: use int8 or bfloat16"):
        EngineSettings(dtype="int4", device="cuda")
    engine = EngineSettings(dtype="int4")
    assert (engine.kv, engine.identity) == ("bfloat16", "int4")


async def test_an_engine_has_it():
    async with Engine.open(EngineConfig(embedded("penstock-mini"), kv_pool_tokens=1024, threads=1)) as engine:
        assert engine.config.dtype == engine.spec.dtype == "bfloat16"

"""The device of an engine, and the store's blocks that lie on it."""

from __future__ import annotations

import structlog
import torch

from penstock.checkpoint import inspect
from penstock.engine.checks import settled
from penstock.engine.config import EngineConfig
from penstock.kv.device.cuda import open_cuda
from penstock.kv.device.memory import Device, DeviceFault
from penstock.runtime.config import ConfigError


def check_device(settings: EngineConfig) -> None:
    """Raises ConfigError when the engine's device is not there, or can't compute in the engine's dtype."""
    if settings.device != "cpu":
        from penstock.engine.kernels.cuda.setup import check  # imported only for CUDA devices

        try:
            check(settled(settings, inspect(settings.model)).dtype, torch.device(settings.device))
        except ValueError as error:
            raise ConfigError("device", settings.device, str(error)) from error


def device_of(name: str) -> Device | None:
    """Opens the device that torch calls `name`. None for the CPU, and when cupy cannot reach the device; blocks
    then come through host memory."""
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return None
    try:
        return open_cuda(int(index or 0))
    except DeviceFault as fault:
        structlog.get_logger("penstock.worker").warning("blocks come through host memory", reason=str(fault))
        return None

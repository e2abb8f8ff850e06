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
    """Raises ConfigError when the engine's devices are not there, or can't compute in the engine's dtype."""
    if settings.device != "cpu":
        from penstock.engine.kernels.cuda.setup import check  # imported only for CUDA devices

        dtype, devices = settled(settings, inspect(settings.model)).dtype, settings.devices
        try:
            check(dtype, torch.device(devices[0]))
        except ValueError as error:
            raise ConfigError("device", settings.device, str(error)) from error
        _check_count(settings, torch.cuda.device_count())
        for device in devices[1:]:
            try:
                check(dtype, torch.device(device))
            except ValueError as error:
                raise ConfigError("device", settings.device, f"{device} is one of {len(devices)}: {error}") from error


def _check_count(settings: EngineConfig, there: int) -> None:
    """Raises ConfigError when the processes of this host are more than the devices for them."""
    numbers = [torch.device(device).index or 0 for device in settings.devices]
    if max(numbers) >= there:
        name = "tp" if settings.tp > 1 else "pp"
        right = (
            f"needs {len(numbers)} CUDA devices from cuda:{numbers[0]} on, one for each process of this host, which has "
            f"{there}: choose fewer"
        )
        raise ConfigError(name, getattr(settings, name), right)


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

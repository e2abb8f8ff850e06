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
        _check_count(settings, torch.cuda.device_count())
        for device in devices:
            try:
                check(dtype, torch.device(device))
            except ValueError as error:
                which = "" if device == devices[0] else f"{device} is one of {len(devices)}: "
                raise ConfigError("device", settings.device, f"{which}{error}") from error


def _check_count(settings: EngineConfig, there: int) -> None:
    """Raises ConfigError when several processes of this host are more than the devices for them, if there are any."""
    numbers = [torch.device(device).index or 0 for device in settings.devices]
    if len(numbers) > 1 and 0 < there <= max(numbers):
        name = "tp" if settings.tp > 1 else "pp"
        devices = f"{len(numbers)} CUDA devices from cuda:{numbers[0]} on"
        right = f"needs {devices}, one for each process, and there are {there} in all: choose less, or other devices"
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

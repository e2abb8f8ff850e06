"""What `Runner` needs for a model on a CUDA device, in the order in which it is made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from penstock.checkpoint import Checkpoint, ModelConfig
from penstock.engine.kernels.cuda import experts, streams
from penstock.engine.kernels.cuda.capability import check_dtype
from penstock.engine.kernels.cuda.choose import candidates, choose
from penstock.engine.kernels.cuda.graphs import CudaCapture, Forward
from penstock.engine.kernels.cuda.matrix import Float8Matrix, Int8Matrix, refusal
from penstock.engine.kernels.cuda.memory import CudaMemory
from penstock.engine.kernels.cuda.paged import Heads, PagedAttention
from penstock.engine.kernels.cuda.steps import DeviceSteps
from penstock.engine.kernels.cuda.streams import current
from penstock.engine.kernels.cuda.upload import Upload
from penstock.engine.layers.linear import Matrix
from penstock.engine.layers.stacks import Keep, Stack, as_it_is
from penstock.engine.layers.weights import Weights
from penstock.engine.step.batch import BatchBuilder
from penstock.engine.step.memory import PageMemory

_ROUNDING = 0.1
"""By how much products in 8 bits may be off when they are tried, as a share of the largest result."""
_log = logging.getLogger(__name__)


def check(dtype: str, device: torch.device) -> None:
    """Raises ValueError when there is no such device, or it can't compute with weights of this type."""
    if not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but torch {torch.__version__} finds no CUDA device: use cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device} was asked for, but there are only {torch.cuda.device_count()}, and the first is cuda:0"
        )
    check_dtype(dtype, torch.cuda.get_device_capability(device))


def use(device: torch.device) -> None:
    """The calling thread computes on this device alone."""
    streams.use(device)


def uploading(checkpoint: Checkpoint, device: torch.device) -> AbstractContextManager[Upload]:
    """Begins to bring the weights to the device, while the caller does other things until it takes them."""
    return Upload(checkpoint, device)


def memory_on(device: torch.device) -> CudaMemory:
    """The memory of the pages on this device, and the copies of pages."""
    return CudaMemory(device)


def keep_for(dtype: str, device: torch.device) -> Keep:
    """How matrices are kept on this device. Raises ValueError when torch can't multiply them there."""
    if dtype == "int8":
        return _keep_int8(device)
    if dtype == "float8":
        return _keep_float8(device)
    return as_it_is


def _keep_int8(device: torch.device) -> Keep:
    reason = refusal(lambda x, matrix: Int8Matrix.of(matrix, None, True).product(x), device, _ROUNDING)
    if reason is not None:
        _log.warning(
            "int8 weights are converted to bfloat16 in each step, because torch's own product does not work here: %s",
            reason,
        )

    def keep(_: Stack, matrix: Callable[[], Tensor], bias: Tensor | None) -> tuple[Matrix, Tensor | None]:
        return Int8Matrix.of(matrix(), bias, reason is None), None

    return keep


def _keep_float8(device: torch.device) -> Keep:
    reason = refusal(lambda x, matrix: Float8Matrix.of(matrix, None).product(x), device, _ROUNDING)
    if reason is not None:
        raise ValueError(f"dtype float8 does not work on {device} with torch {torch.__version__}: {reason}; use int8")

    def keep(stack: Stack, read: Callable[[], Tensor], bias: Tensor | None) -> tuple[Matrix, Tensor | None]:
        """Leaves the head as it is: no later layer evens out its rounding."""
        matrix = read()
        if stack.name == "head" or not Float8Matrix.fits(matrix):
            return matrix, bias
        return Float8Matrix.of(matrix, bias), None

    return keep


def group_experts(weights: Weights, activation: str, device: torch.device) -> None:
    """Has the experts of `weights` computed by one product for all of them, if this device has such products."""
    experts.group_experts(weights, activation, torch.cuda.get_device_capability(device))


def attention_for(config: ModelConfig, memory: PageMemory) -> PagedAttention | None:
    """The backend for the device of this page memory; None for models whose pages no backend reads."""
    if config.latent is not None or config.chunked:
        return None
    capability = torch.cuda.get_device_capability(memory.data.device)
    with current(memory.data.device):
        return choose(config, memory, candidates(Heads.of(config), memory, capability))


def steps_for(
    decoder: Forward,
    memory: PageMemory,
    builder: BatchBuilder,
    attention: PagedAttention | None,
    *,
    most_sequences: int,
    max_positions: int,
    capture: bool,
) -> DeviceSteps:
    """Computes the model's steps, with `capture` as graphs where that is possible. Without `attention`, torch gathers
    pages."""
    return DeviceSteps(
        decoder,
        memory,
        builder,
        attention,
        capture=CudaCapture() if capture else None,
        most_sequences=most_sequences,
        max_positions=max_positions,
    )

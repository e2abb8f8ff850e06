"""Streams and events, with types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that runs beside the default stream and does not wait for it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that happens when the stream has done what was submitted to it so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def use(device: torch.device) -> None:
    """Makes `device` the calling thread's device from now on, so that nothing of it takes memory on the first one."""
    torch.cuda.set_device(device)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the calling thread's device: kernels and captures that are not torch's use that one. On a CPU it
    does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

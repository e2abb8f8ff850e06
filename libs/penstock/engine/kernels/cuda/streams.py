"""Streams and events, with types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Runs beside the default stream, and does not wait for it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that happens when what was submitted to the stream so far is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes it the calling thread's device, which kernels and captures go by that are not torch's; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

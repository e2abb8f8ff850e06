"""How one engine is set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DTYPES = ("float32", "bfloat16", "int8", "float8")
KV_DTYPES = ("float32", "bfloat16", "int8")
WEIGHTS = ("plain", "lossless")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Checked when made: ValueError names the field."""

    model: Path
    dtype: str = "float32"
    """How weights are kept: float32, bfloat16, or, with a scale per column, int8 and on a CUDA device float8. What
    a device can't compute is refused when it is opened."""
    kv_dtype: str | None = None
    """How keys and values are kept: float32, bfloat16, or on a CPU int8 with a scale per head and token. None: as the
    weights are, bfloat16 when these have 8 bits."""
    weights: str = "plain"
    """lossless: bfloat16 in 12 bits a weight, bit-exact, for the C++ kernels of a CPU; a step reads less memory."""
    device: str = "cpu"
    """cpu, cuda or cuda:0, cuda:1..."""
    block_size: int = 16
    """Tokens per page."""
    kv_pool_tokens: int = 32768
    """Size of the page pool, in tokens; rounded up to whole pages."""
    max_batch_tokens: int = 512
    """Rows of one forward pass: decode rows, drafts and prefill chunks together."""
    itl_target_s: float | None = 0.1
    """Seconds from token to token that running streams should see while others' prompts are computed in the same
    batch: prompts get chunks for which that is enough time, though never less than 16 tokens or half a decode step's
    time. None: as much as fits in a batch."""
    max_running: int = 64
    max_waiting: int = 256
    """Requests that are being loaded or wait for their first step; more are refused with EngineBusy."""
    max_model_len: int | None = None
    """Tokens of prompt and output; None takes the model's own limit.

    Models with longrope have two: above their original context all texts, short ones too, get the rotation for long
    contexts, and the KV has another fingerprint. None is the original context.
    """
    kernels: bool = True
    """Use the C++ kernels on a CPU, when there is a compiler and the model suits them."""
    packed_bytes: int = 16 << 30
    """Packed weights on disk, in the user's cache, of this and other models: used longest ago goes first. 0: none."""
    threads: int | None = None
    """Threads of the step; None: one for each core of this process, of the kernels one for 16 MiB of weights."""
    draft_tokens: int = 4
    """Most tokens to ask a drafter for, per sequence and step."""
    draft_timeout_s: float = 0.05
    stall_s: float = 1.0
    """When nothing could run for so long, pages that sources are still filling are taken away from them."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, or None, not {self.kv_dtype!r}")
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or not (number.isdecimal() or self.device == kind):
            raise ValueError(f"device must be cpu, cuda, or cuda and its number (cuda:0), not {self.device!r}")
        if kind != "cpu" and self.kv != _own_kv(self.dtype):
            raise ValueError(f"kv_dtype on {self.device} must be that of the weights, {_own_kv(self.dtype)}")
        if self.dtype == "float8" and kind == "cpu":
            raise ValueError("dtype float8 needs a CUDA device, device is 'cpu': use int8 or bfloat16 there")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {self.weights!r}")
        if self.weights == "lossless" and self.dtype != "bfloat16":
            raise ValueError(f"weights can be lossless with dtype bfloat16 only, not with {self.dtype}")
        if self.weights == "lossless" and kind != "cpu":
            raise ValueError(f"weights can be lossless on a cpu only, not on {self.device}")
        for name in ("block_size", "kv_pool_tokens", "max_batch_tokens", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.packed_bytes < 0:
            raise ValueError(f"packed_bytes must be 0 (keep none) or a size, not {self.packed_bytes}")
        if self.itl_target_s is not None and self.itl_target_s <= 0:
            raise ValueError(f"itl_target_s must be positive, or None for no target, not {self.itl_target_s}")
        if self.draft_tokens < 0 or self.draft_timeout_s <= 0 or self.stall_s <= 0:
            raise ValueError("draft_tokens must not be negative, draft_timeout_s and stall_s must be positive")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} is below max_running {self.max_running}: "
                "some running sequence would never get its row"
            )

    @property
    def kv(self) -> str:
        """`kv_dtype` where it is given, else what `dtype` implies."""
        return self.kv_dtype or _own_kv(self.dtype)

    @property
    def identity(self) -> str:
        """Names how numbers are kept: weights, and KV where that is not implied."""
        return self.dtype if self.kv == _own_kv(self.dtype) else f"{self.dtype}, KV {self.kv}"


def kv_token_bytes(kv_dtype: str, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's keys and values."""
    vector = {"float32": 4 * head_dim, "bfloat16": 2 * head_dim, "int8": head_dim + 4}[kv_dtype]
    return 2 * layers * kv_heads * vector


def _own_kv(dtype: str) -> str:
    return "float32" if dtype == "float32" else "bfloat16"

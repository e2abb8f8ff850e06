"""`penstock plan`: what a model takes and gives on given devices, before any of them is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from penstock.checkpoint import EMBEDDING, CheckpointError
from penstock.engine.config import EngineSettings
from penstock.models import NAMES, embedded
from penstock.runtime.config import ConfigError, Size
from penstock.sizing import Described, DeviceKind, Sized, Sizing, StageRank, Workload, describe, enough, size

app = App(name="plan", help="Sizes a model for GPUs, before any of them is there.")
_GIB = 1 << 30
_SHOWN = 8
"""Other splits in the table."""
_Chosen = Annotated[int, Parameter(show_default=False)]
"""0: by the command itself."""
_Bandwidth = Annotated[Size, Parameter(show_default=lambda size: f"{size / 10**12:g}TB")]
_SAYS = {"headers": "its files of weights say", "index": "its index says", "config": "its config.json says"}


@app.default
def plan(
    model: str,
    *,
    gpus: _Chosen = 0,
    gpu_memory: Size = 80 * _GIB,
    bandwidth: _Bandwidth = 3_350 * 10**9,
    reserve: Size = _GIB,
    host_gpus: int = 8,
    sync_us: float = 10.0,
    context: _Chosen = 0,
    streams: int = 1,
    batch_tokens: int = EngineSettings().max_batch_tokens,
    tp: _Chosen = 0,
    pp: _Chosen = 0,
    ep: _Chosen = 0,
    dtype: str = "auto",
    kv_dtype: Annotated[str, Parameter(show_default=False)] = "",
    redundant_experts: int = 0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Says what a model takes on each GPU and how fast it can decode, from its config.json alone: weights, KV, what
    fits, and how to divide it. The exit status is 1 when not all streams fit.

    Args:
        model: a directory with a config.json, such a file, or the name of an embedded model. An index or headers of
            weights beside it are read if they are there.
        gpus: GPUs; the ranks of --tp, --pp and --ep unless told, or 1.
        gpu_memory: bytes of one, such as 80GiB.
        bandwidth: bytes that one reads from its memory in a second, such as 3.35TB.
        reserve: bytes of one for the driver, collectives and what is lost between allocations.
        host_gpus: GPUs of one host: a layer is divided only among those, unless --tp or --ep says otherwise.
        sync_us: microseconds of a collective among ranks, beyond what memory takes.
        context: tokens of each stream, prompt and output together; the model's own limit unless told.
        streams: sequences that are decoded at a time.
        batch_tokens: most tokens of one step.
        tp: tensor parallel ranks; chosen unless told.
        pp: stages of layers; chosen unless told.
        ep: expert parallel ranks; chosen unless told.
        dtype: type of weights: auto (as the checkpoint has them), float32, bfloat16, int8, int4 (which workers of this
            version have on a CPU alone) or float8.
        kv_dtype: type of keys and values: float32, bfloat16 or int8; bfloat16 unless told, float32 with such weights.
        redundant_experts: experts of each layer of which every expert parallel rank has copies.
        json: print one JSON object and nothing else.
    """
    for name, value in (("gpus", gpus), ("context", context), ("tp", tp), ("pp", pp), ("ep", ep)):
        if value < 0:
            raise ConfigError(name, value, "must be 1 or more, or be left out")
    described = _described(model)
    own = "float32" if described.forms[EMBEDDING].bits == 32 else "bfloat16"
    if dtype == "auto" and described.quantisation is None:
        dtype = own
    devices = DeviceKind(
        gpus=gpus or max(pp, 1) * max(tp, ep, 1),
        gpu_memory=gpu_memory,
        bandwidth=bandwidth,
        reserve=reserve,
        host_gpus=host_gpus,
        sync_us=sync_us,
    )
    work = Workload(
        context=context or described.config.max_positions,
        streams=streams,
        batch_tokens=batch_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype or ("float32" if dtype == "float32" else "bfloat16"),
        redundant_experts=redundant_experts,
    )
    found = size(described, devices, work, tensor=tp, pipeline=pp, expert=ep)
    fits = found.ways[0].fits
    more = None if fits else enough(described, devices, work, tensor=tp, pipeline=pp, expert=ep)
    if json:
        plain = _plain(described, devices, work, found)
        print(dumps({**plain, "enough": None if more is None else _plain_way(more)}, indent=2))
    else:
        print("\n".join(_lines(described, devices, work, found)))
        if not fits:
            print(_advice(more, found.ways[0]))
    return 0 if fits else 1


def _described(model: str) -> Described:
    path = embedded(model) if model in NAMES else Path(model).expanduser()
    if not path.exists():
        right = f"is no directory, no config.json and no embedded model ({', '.join(NAMES)})"
        raise ConfigError("model", model, right)
    try:
        return describe(path)
    except CheckpointError as error:
        raise ConfigError("model", model, str(error)) from error


def _plain(model: Described, devices: DeviceKind, work: Workload, found: Sizing) -> dict[str, Any]:
    """Bytes, tokens, and tokens per second."""
    return {
        "model": {
            "file": str(model.file),
            "by": model.by,
            "architecture": model.config.architecture,
            "parameters": found.parameters,
            "parameters_used": found.used,
            "stored_bytes": model.stored_bytes,
            "picture_bytes": model.picture_bytes,
            "quantised": model.quantisation.kind if model.quantisation else None,
            "max_positions": model.config.max_positions,
        },
        "gpus": devices.gpus,
        "gpu_memory": devices.gpu_memory,
        "bandwidth": devices.bandwidth,
        "reserve": devices.reserve,
        "context": work.context,
        "streams": work.streams,
        "dtype": work.dtype,
        "kv_dtype": work.kv_dtype,
        "redundant_experts": work.redundant_experts,
        "kv_token_bytes": found.kv_token,
        "kv_stream_bytes": found.kv_stream,
        "kv_alive_bytes": found.kv_alive,
        "recommended": _plain_way(found.ways[0]),
        "others": [_plain_way(way) for way in found.ways[1:]],
    }


def _plain_way(way: Sized) -> dict[str, Any]:
    return {
        "tp": way.split.tensor,
        "pp": way.split.pipeline,
        "ep": way.split.expert,
        "workers": way.workers,
        "fits": way.fits,
        "stages": [
            {
                "ranks": way.split.group,
                "layers": [rank.layers.start, rank.layers.stop],
                "weights": rank.weights,
                "experts": rank.experts,
                "pictures": rank.pictures,
                "activations": rank.activations,
                "left_for_kv": rank.room,
                "kv_token_bytes": rank.kv_token,
                "kv_tokens": rank.kv_tokens,
            }
            for rank in way.ranks
        ],
        "left_for_kv": sum(rank.room for rank in way.ranks) * way.split.group,
        "kv_tokens": way.kv_tokens,
        "streams_that_fit": way.most_streams,
        "tokens_per_s_alone": way.alone.tokens_per_s,
        "tokens_per_s_stream": 1 / way.together.step_s,
        "tokens_per_s": way.tokens_per_s,
        "batch": way.together.batch,
        "weights_read": way.together.weights_read,
        "kv_read": way.together.kv_read,
    }


def _lines(model: Described, devices: DeviceKind, work: Workload, found: Sizing) -> Iterator[str]:
    best, config = found.ways[0], model.config
    numbers = f"{_numbers(found.parameters)} parameters in the decoder, {_numbers(found.used)} used by a token"
    how = f", {model.quantisation.kind}" if model.quantisation else ""
    yield (f"{config.architecture}: {numbers}; {_decimal(model.stored_bytes)} on disk{how} ({_SAYS[model.by]})")
    yield (
        f"{_counted(devices.gpus, 'GPU')} of {_gib(devices.gpu_memory)}, {devices.bandwidth / 1e9:.0f} GB/s each; "
        f"{_counted(work.streams, 'stream')} of {work.context} tokens; weights {work.dtype}, KV {work.kv_dtype}"
    )
    alive = f", of which its next token looks at {_gib(found.kv_alive)}" if found.kv_alive < found.kv_stream else ""
    yield f"KV of a token: {found.kv_token} bytes; of a stream: {_gib(found.kv_stream)}{alive}"
    yield ""
    yield from _recommended(best, devices)
    if len(found.ways) > 1:
        yield ""
        heads = ["", "workers", "weights", "left for KV", "KV tokens", "holds", "alone", "all streams"]
        yield from _table(heads, map(_row, _next_best(found.ways)))
    if model.quantisation is not None and work.dtype == "auto":
        yield ""
        kind = model.quantisation.kind
        where = " on a GPU" if kind == "int4" else ""
        yield (
            f"Matrices in {kind} are counted as they are stored. Workers of this version unpack them{where}: "
            "--dtype bfloat16 counts that."
        )


def _recommended(best: Sized, devices: DeviceKind) -> Iterator[str]:
    verdict = "" if best.fits else f"; holds {best.held} of {_counted(best.wanted, 'stream')}"
    yield f"{_name(best)}: {_workers(best)}{verdict}"
    heads = ["ranks", "layers", "weights", "(experts)", "(pictures)", "activations", "reserve", "left for KV"]
    rows = (_stage(best, number, rank, devices) for number, rank in enumerate(best.ranks))
    yield from _table([*heads, "KV of a token", "KV tokens"], rows)
    left = sum(rank.room for rank in best.ranks) * best.split.group
    yield (
        f"A worker has {_gib(left)} for KV on all its ranks: room for {best.kv_tokens} tokens, "
        f"{_counted(best.most_streams, 'whole stream')}"
    )
    yield (
        f"At most {best.alone.tokens_per_s:.0f} tokens/s for one stream alone; {1 / best.together.step_s:.0f} for each "
        f"and {best.tokens_per_s:.0f} for all of {_counted(best.wanted, 'stream')}"
    )
    weights, kv = _decimal(best.together.weights_read), _decimal(best.together.kv_read)
    slow = " of the slowest stage" if best.split.pipeline > 1 else ""
    batch = _counted(best.together.batch, "stream")
    yield f"A rank{slow} reads {weights} of weights and {kv} of KV in a step, of {batch} at a time"


def _advice(more: Sized | None, best: Sized) -> str:
    what = "They do not all fit" if best.held else "They do not fit"
    if more is None:
        return f"\n{what}, on 64 times as many GPUs either: give a shorter --context, or GPUs with more memory"
    gpus = more.workers * more.split.ranks
    return f"\n{what}; {gpus} such GPUs hold {_counted(more.wanted, 'stream')}: {_name(more)}, {_workers(more)}"


def _workers(way: Sized) -> str:
    return f"{_counted(way.workers, 'worker')} of {_counted(way.split.ranks, 'rank')}"


def _stage(way: Sized, number: int, rank: StageRank, devices: DeviceKind) -> list[str]:
    first = number * way.split.group
    last = first + way.split.group - 1
    return [
        f"{first}-{last}" if last > first else str(first),
        f"{rank.layers.start}-{rank.layers.stop - 1}",
        *map(_gib, (rank.weights, rank.experts, rank.pictures, rank.activations, devices.reserve, rank.room)),
        f"{rank.kv_token} B",
        str(rank.kv_tokens),
    ]


def _next_best(ways: Sequence[Sized]) -> Sequence[Sized]:
    """Of ways that differ in how experts are divided alone, the best."""
    found: dict[tuple[int, int, int], Sized] = {}
    for way in ways:
        found.setdefault((way.split.tensor, way.split.pipeline, way.split.group), way)
    return list(found.values())[1 : 1 + _SHOWN]


def _row(way: Sized) -> list[str]:
    tightest = min(way.ranks, key=lambda rank: rank.room)
    return [
        _name(way),
        str(way.workers),
        *map(_gib, (tightest.weights, tightest.room)),
        str(way.kv_tokens),
        _counted(way.held, "stream"),
        f"{way.alone.tokens_per_s:.0f}/s",
        f"{way.tokens_per_s:.0f}/s",
    ]


def _name(way: Sized) -> str:
    return f"tp {way.split.tensor} pp {way.split.pipeline} ep {way.split.expert}"


def _table(heads: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    lines = [list(heads), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _numbers(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.2f} million"


def _decimal(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"

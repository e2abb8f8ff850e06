"""Which layers of a model look back how far."""

from __future__ import annotations

from penstock.checkpoint.families import Family, Windows
from penstock.checkpoint.reading import Reader

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def parse_windows(read: Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """By layer: the tokens that a row looks at, its own included, or those of a chunk; None: all up to its own."""
    if family.windows is Windows.CHUNKS:
        return _chunks(read, family, layers)
    window = _window(read, family)
    kinds = _kinds(read, family, layers, window)
    if SLIDING in kinds and window is None:
        raise read.fail(
            "sliding_window is null or not in use, but layer_types names layers of sliding_attention: "
            "give the window's tokens (and use_sliding_window true where the family has it)"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def unrotated_layers(read: Reader, layers: int) -> tuple[int, ...]:
    """The layers without positions of Llama 4. Its `no_rope_layers` holds a 1 for each layer that rotates, and a 0 for
    each that does not; absent, every `no_rope_layer_interval`-th does not. Raises CheckpointError."""
    given = read.values.get("no_rope_layers")
    if not given:
        every = read.integer("no_rope_layer_interval", 4)
        return tuple(range(every - 1, layers, every))
    if not isinstance(given, list) or len(given) != layers or not all(type(each) is int for each in given):
        raise read.fail(f"no_rope_layers must be a list of num_hidden_layers {layers} numbers 0 or 1, not {given!r}")
    return tuple(layer for layer, turned in enumerate(given) if not turned)


def _chunks(read: Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    unrotated = unrotated_layers(read, layers)
    kinds = read.values.get("layer_types")
    if kinds is None:
        kinds = [FULL if layer in unrotated else CHUNKED for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, CHUNKED) for kind in kinds):
        raise read.fail(f"layer_types must be a list of num_hidden_layers {layers} {FULL} or {CHUNKED}, not {kinds!r}")
    if CHUNKED not in kinds:
        return (None,) * layers
    if "attention_chunk_size" in read.values and read.values["attention_chunk_size"] is None:
        raise read.fail(f"attention_chunk_size is null, but layers are {CHUNKED}: give the tokens of a chunk")
    size = read.integer("attention_chunk_size", family.window)
    return tuple(size if kind == CHUNKED else None for kind in kinds)


def _window(read: Reader, family: Family) -> int | None:
    if family.windows is Windows.NONE:
        return None
    if family.windows in (Windows.ALL_IF_USED, Windows.LATE_IF_USED) and not read.flag("use_sliding_window", False):
        return None
    window = read.values.get("sliding_window", family.window)
    return None if window is None else read.integer("sliding_window", family.window)


def _kinds(read: Reader, family: Family, layers: int, window: int | None) -> tuple[str, ...]:
    """From `layer_types` where the family goes by it, else as the family always has it."""
    usual = _usual_kinds(read, family, layers, window)
    given = read.values.get("layer_types")
    if given is None:
        return usual
    if not isinstance(given, list) or len(given) != layers:
        raise read.fail(f"layer_types must be a list of num_hidden_layers {layers} names, not {given!r}")
    for kind in given:
        if kind not in (FULL, SLIDING):
            raise read.fail(f"layer_types {kind!r} is not supported, only {FULL} and {SLIDING}")
    if not family.windows.by_type and tuple(given) != usual:
        raise read.fail(f"layer_types {given!r} is not supported: this family has windows in {family.windows.value}")
    return tuple(given)


def _usual_kinds(read: Reader, family: Family, layers: int, window: int | None) -> tuple[str, ...]:
    if window is None:
        return (FULL,) * layers
    if family.windows is Windows.LATE_IF_USED:
        begin = read.integer("max_window_layers", 28)
        return tuple(SLIDING if layer >= begin else FULL for layer in range(layers))
    if family.windows is Windows.MOST:
        every = read.integer("sliding_window_pattern", family.full_every)
        return tuple(FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers))
    return (SLIDING,) * layers

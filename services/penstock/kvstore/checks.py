"""Bounds on the messages of the store's clients, in addition to those of every service. Each check raises
InvalidRequest that names the field."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InvalidRequest, Refused
from penstock.kv.bytes.checksum import CHECKSUM_BYTES
from penstock.kv.spec import KvSpec
from penstock.rpc.bounds import check_count, check_length, check_name, check_seconds

_MAX_NAME = 256
_MAX_SOURCES = 16
_MAX_RANGES = 256
"""A model has no more runs of layers that look at everything."""
_LEAST_RANGE = 8
"""Bytes, on average. A range costs as much to find as some kilobytes to send."""
_MAX_BLOCK_BYTES = 1 << 30


def check_short_name(field: str, name: str) -> None:
    """A name that the store keeps or logs."""
    check_name(field, name, most=_MAX_NAME)


def check_sources(sources: Sequence[str]) -> None:
    """A few addresses. Whether they may be called is another question: see Neighbours."""
    check_count("sources", sources, _MAX_SOURCES)
    for source in sources:
        check_short_name("sources", source)


def check_checksum(field: str, value: bytes) -> None:
    """Checks a checksum, which may be empty."""
    check_length(field, value, 0, CHECKSUM_BYTES)


def check_block_length(length: int, block_bytes: int) -> None:
    """The blocks that a client writes are as long as those it announced. Raises Refused."""
    if length != block_bytes:
        raise Refused(f"length is {length}, the blocks of this store have {block_bytes} bytes", field="length")


def check_ranges(ranges: Sequence[tuple[int, int]], block_bytes: int) -> None:
    """Pieces (begin, end) of a block, in order; few, and not all of them tiny."""
    check_count("ranges", ranges, _MAX_RANGES)
    at = 0
    for begin, end in ranges:
        if not at <= begin < end <= block_bytes:
            what = f"ranges has {begin} to {end} behind {at}; they are in order, not empty, and in {block_bytes} bytes"
            raise InvalidRequest(what, field="ranges")
        at = end
    wanted, least = sum(end - begin for begin, end in ranges), _LEAST_RANGE * len(ranges)
    if wanted < least:
        raise InvalidRequest(f"ranges has {wanted} bytes in {len(ranges)}; it has at least {least}", field="ranges")


def check_spec(spec: KvSpec) -> None:
    """A spec that describes blocks."""
    for name in ("model", "tokenizer", "layout", "dtype"):
        check_short_name(f"spec.{name}", getattr(spec, name))
    if spec.block_size < 1:
        raise InvalidRequest("spec.block_size must be at least 1 token", field="spec.block_size")
    if not 1 <= spec.block_bytes <= _MAX_BLOCK_BYTES:
        raise InvalidRequest(f"spec.block_bytes must be 1 to {_MAX_BLOCK_BYTES}", field="spec.block_bytes")


def lease_seconds(asked: float, longest: float) -> float:
    """The seconds to grant: as many as asked, at most `longest`; 0 asks for `longest`."""
    check_seconds("lease_s", asked)
    return min(asked, longest) if asked else longest

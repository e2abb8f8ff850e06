"""The alphabet of byte-level BPE (GPT-2, 2019): a printed character for each byte."""

from __future__ import annotations


def byte_table() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + number): byte for number, byte in enumerate(rest)}

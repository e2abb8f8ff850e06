"""Who holds a device slot, as clients see it."""

from __future__ import annotations

import os

import pytest

from penstock.kv.bytes.arena import MapError
from penstock.kv.device.epochs import EpochMap, EpochTable


def test_both_sides_see_the_same_epochs() -> None:
    table = EpochTable(5)
    mapped = EpochMap(table.path, table.table_id, 5)
    assert mapped.holds(4, 0)
    table.set(4, 1 << 60)
    assert mapped.holds(4, 1 << 60) and mapped.holds(3, 0)
    table.close()
    assert mapped.holds(4, 1 << 60), "a client's mapping stays"
    mapped.close()


def test_only_the_table_itself_is_mapped(tmp_path: os.PathLike[str]) -> None:
    table, other = EpochTable(5), EpochTable(5)
    plain = os.path.join(tmp_path, "plain")
    with open(plain, "wb") as file:
        file.write(table.table_id + bytes(40))
    for path, slots, reason in [
        (other.path, 5, "another epoch table"),
        (table.path, 6, "a file of 56 bytes, not to the epochs of 6 slots"),
        (plain, 5, "can't be mapped: Invalid argument"),
        (plain + "x", 5, "No such file"),
    ]:
        with pytest.raises(MapError, match=reason):
            EpochMap(path, table.table_id, slots)
    table.close()
    other.close()

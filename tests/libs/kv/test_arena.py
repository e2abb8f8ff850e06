"""The shared memory itself."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from penstock.kv.bytes.arena import Arena, ArenaMap, Layout, MapError

SIZE = 1 << 20


@pytest.mark.parametrize("block_bytes", [1, 63, 64, 65, 4096, 100_000])
@pytest.mark.parametrize("size", [1 << 16, SIZE, SIZE + 12_345])
def test_a_layout_fits_and_wastes_little(size: int, block_bytes: int) -> None:
    layout = Layout.fit(size, block_bytes)
    assert layout.offset(layout.slots) <= size
    assert layout.slots_at >= layout.epochs_at + 8 * layout.slots
    assert layout.slots_at % 4096 == 0 and layout.stride % 64 == 0
    assert size - layout.offset(layout.slots) < layout.stride + 8 + 4096
    assert all(layout.slot(layout.offset(slot)) == slot for slot in range(layout.slots))


def test_both_sides_see_the_same_bytes_and_epochs() -> None:
    arena = Arena(SIZE)
    layout = Layout.fit(SIZE, 5000)
    arena.format(layout)
    memory = ArenaMap(arena.path, SIZE, arena.arena_id, layout)
    arena.set_epoch(3, 77)
    assert memory.holds(layout.offset(3), 77) and not memory.holds(layout.offset(2), 77)
    memory.block(layout.offset(3), 5000)[:] = b"x" * 5000
    assert bytes(arena.block(3, 5000)) == b"x" * 5000
    arena.format(Layout.fit(SIZE, 100))
    assert not memory.holds(layout.offset(3), 77)
    memory.close()
    arena.close()


def test_nobody_can_resize_the_memory() -> None:
    arena = Arena(SIZE)
    fd = os.open(arena.path, os.O_RDWR)
    for size in (0, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    arena.close()


def test_only_the_right_file_is_mapped(tmp_path: os.PathLike[str]) -> None:
    arena, other = Arena(SIZE), Arena(SIZE)
    layout = Layout.fit(SIZE, 4096)
    plain = os.path.join(tmp_path, "plain")
    with open(plain, "wb") as file:
        file.truncate(SIZE)
    for path, size, arena_id, where, word in (
        (arena.path, SIZE, other.arena_id, layout, "another arena"),
        (arena.path, SIZE // 2, arena.arena_id, layout, "a file of 1048576 bytes"),
        (arena.path, SIZE, arena.arena_id, replace(layout, slots=layout.slots + 9), "another arena"),
        (plain, SIZE, arena.arena_id, layout, "mapped|change its size"),
        ("/proc/1/fd/9999", SIZE, arena.arena_id, layout, "can't be mapped"),
    ):
        with pytest.raises(MapError, match=word):
            ArenaMap(path, size, arena_id, where)
    arena.close()
    other.close()


def test_a_place_that_is_not_a_slot_is_refused() -> None:
    arena = Arena(SIZE)
    layout = Layout.fit(SIZE, 4096)
    memory = ArenaMap(arena.path, SIZE, arena.arena_id, layout)
    for offset, length in (
        (0, 8),
        (layout.slots_at + 1, 8),
        (layout.offset(layout.slots), 8),
        (layout.slots_at - layout.stride, 8),
        (layout.slots_at, layout.stride + 1),
    ):
        with pytest.raises(ValueError, match="not a slot"):
            memory.block(offset, length)
    memory.close()
    arena.close()


def test_a_view_keeps_the_memory_of_a_closed_arena() -> None:
    arena = Arena(SIZE)
    layout = Layout.fit(SIZE, 4096)
    arena.format(layout)
    memory = ArenaMap(arena.path, SIZE, arena.arena_id, layout)
    view = memory.block(layout.offset(0), 4)
    view[:] = b"kept"
    memory.close()
    arena.close()
    assert bytes(view) == b"kept"


def test_pages_are_provided_without_changing_them() -> None:
    arena = Arena(SIZE)
    arena.format(Layout.fit(SIZE, 4096))
    arena.block(0, 4)[:] = b"kept"
    assert arena.populate(0, SIZE)
    assert arena.populate(SIZE - 10, 4096)
    assert bytes(arena.block(0, 4)) == b"kept"
    arena.close()

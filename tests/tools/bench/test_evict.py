"""`penstock bench evict` over a small trace: its processes, its figures, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.bench.evict.comparisons import Comparison
from penstock.bench.evict.measure import default_traces, measure
from penstock.runtime.config import ConfigError


def written(path: Path, session: bool) -> Path:
    """Forty sessions of three turns, in turns; each turn resends what was before."""
    rows = []
    for turn in range(3):
        for talk in range(40):
            ids = [0, *(100 * talk + block + 1 for block in range(3 * turn + 3))]
            row = {"timestamp": 10_000 * (40 * turn + talk), "input_length": 512 * len(ids) + 1, "output_length": 5}
            rows.append(row | {"hash_ids": ids} | ({"session": talk} if session else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_a_table_per_trace_and_figures_over_all(tmp_path: Path) -> None:
    paths = [written(tmp_path / "plain.jsonl", False), written(tmp_path / "talks.jsonl", True)]
    report = await measure(paths, quick=True)
    found = json.loads(report.json())
    assert {head["trace"] for head in found["traces"]} == {"plain", "talks", "talks, overlaid"}
    hinted = {row["trace"] for row in found["replays"] if row["policy"] == "worth, hints"}
    assert hinted == {"talks", "talks, overlaid"}
    assert len(found["replays"]) == sum(head["replays"] for head in found["traces"])
    ids = {one["id"] for one in found["figures"]}
    assert "seconds_saved_vs_lru_min" in ids or "seconds_saved_vs_lru_elsewhere_min" in ids
    assert report.shown()


def place(lru: float, ours: float, best: float) -> Comparison:
    saved = {"lru": lru, "worth": ours, "offline": best}
    return Comparison("t", False, (1,), {name: {"seconds_saved": value} for name, value in saved.items()})


def test_a_place_counts_where_lru_is_neither_hopeless_nor_good_enough() -> None:
    assert [place(lru, 1.0, 10.0).counts for lru in (2.0, 3.0, 9.0, 9.5)] == [False, True, True, False]
    assert place(4.0, 5.0, 10.0).ratio("worth", "lru") == 1.25
    assert place(0.0, 0.0, 0.0).ratio("worth", "lru") == 1.0, "nothing to save is no loss"


async def test_what_can_not_be_replayed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'[^']*none[^']*': there is no such file"):
        await measure([tmp_path / "none.jsonl"], quick=True)
    table = tmp_path / "lengths.csv"
    table.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(ConfigError, match=r"'[^']*lengths[^']*': a table of lengths"):
        await measure([table], quick=True)


def test_the_default_is_a_directory_without_texts_whose_ids_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name files with --trace"):
        default_traces(tmp_path)
    for name in ("a.jsonl.gz", "b.jsonl.gz", "b_hash16.jsonl.gz", "c.csv.gz"):
        (tmp_path / name).touch()
    assert [path.name for path in default_traces(tmp_path)] == ["a.jsonl.gz", "b_hash16.jsonl.gz"]

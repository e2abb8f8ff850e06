"""`python -m penstock.observing`: writes deploy/grafana/boards and docs/metrics.md anew, in the current directory."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.observing.boards import BOARDS
from penstock.observing.catalogue import document
from penstock.observing.panels import Board, board_json


def written(board: Board) -> str:
    """A board's file."""
    return json.dumps(board_json(board), indent=2, ensure_ascii=False) + "\n"


def files() -> dict[Path, str]:
    """All files that are made, by their paths in the repository."""
    boards = {Path("deploy/grafana/boards") / f"{board.name}.json": written(board) for board in BOARDS}
    return {**boards, Path("docs/metrics.md"): document()}


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

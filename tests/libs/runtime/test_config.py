"""Command line over environment over file, and a bad value is heard of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.runtime.config import ConfigError, Size, format_size, parse_size, service_app


@dataclass(frozen=True, kw_only=True)
class Base:
    """What all have."""

    address: str = "127.0.0.1:0"
    """Where."""
    room: Size = 1024
    """How much."""


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """A service's settings."""

    workers: int = 1
    """How many."""
    fast: bool = False
    """Whether."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError("workers", self.workers, "must be at least 1")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Settings:
        got: list[Settings] = []
        app = service_app("toy", got.append, Settings)
        app(list(arguments), result_action="return_value")
        return got[0]

    return run


def test_defaults(start: Callable[..., Settings]) -> None:
    assert start() == Settings()


def test_command_line_over_environment_over_file(
    start: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "penstock.toml").write_text("[toy]\nworkers = 2\nroom = '1KiB'\nfast = true\n[other]\nx = 1\n")
    assert start() == Settings(workers=2, fast=True)
    monkeypatch.setenv("PENSTOCK_TOY_WORKERS", "3")
    monkeypatch.setenv("PENSTOCK_TOY_ROOM", "2GiB")
    assert start() == Settings(workers=3, fast=True, room=2 << 30)
    assert start("--workers", "4", "--no-fast", "--room", "3MiB") == Settings(workers=4, room=3 << 20)


def test_the_file_can_be_elsewhere(
    start: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("[toy]\nworkers = 9\n")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "mine.toml"))
    assert start().workers == 9


@pytest.mark.parametrize(
    "arguments", [("--workers", "0"), ("--workers", "x"), ("--room", "much"), ("--unheard-of", "1")]
)
def test_a_bad_value_ends_the_program_with_a_word(
    start: Callable[..., Settings], arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        start(*arguments)
    said = f"{caught.value.code} {''.join(capsys.readouterr())}"
    assert caught.value.code
    assert arguments[0].strip("-") in said


def test_sizes() -> None:
    assert [parse_size(text) for text in ("0", "12", "1KiB", "1.5 GiB", "2gb", "3MB")] == [
        0,
        12,
        1024,
        3 << 29,
        2 * 10**9,
        3 * 10**6,
    ]
    for bad in ("", "much", "-1GiB", "1 parsec", "GiB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(bad)
    for size in (0, 1, 1023, 1024, 1 << 30, 3 << 20, 10**9):
        assert parse_size(format_size(size)) == size

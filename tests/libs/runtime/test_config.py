"""Command line over environment over file, and a bad value is heard of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.runtime.addresses import HostPort, UnixPath, socket_address
from penstock.runtime.config import (
    Address,
    Addresses,
    ConfigError,
    OptionalAddress,
    OptionalPortAddress,
    Size,
    address_lists,
    addresses,
    at_least,
    format_size,
    more_than,
    one_of,
    optional_addresses,
    optional_port_addresses,
    parse_size,
    service_app,
    within,
)


@dataclass(frozen=True, kw_only=True)
class Base:
    """What all have."""

    address: Address = HostPort("127.0.0.1:0")
    """Where."""
    peer: OptionalAddress = None
    """Beside whom."""
    routers: Addresses = ()
    """Under whom."""
    metrics: OptionalPortAddress = None
    """Where figures are."""
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
        addresses(self, "address")
        optional_addresses(self, "peer")
        address_lists(self, "routers")
        optional_port_addresses(self, "metrics")
        at_least(self, 1, "workers")


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


def test_several_addresses_come_from_anywhere(
    start: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (HostPort("127.0.0.1:1"), HostPort("[::1]:2"))
    assert Settings(routers="127.0.0.1:1, [::1]:2,127.0.0.1:1").routers == both  # type: ignore[arg-type]
    assert Settings(routers="").routers == ()  # type: ignore[arg-type]
    assert start("--routers", "127.0.0.1:1,[::1]:2").routers == both
    assert start("--routers", "127.0.0.1:1", "--routers", "[::1]:2").routers == both
    monkeypatch.setenv("PENSTOCK_TOY_ROUTERS", "127.0.0.1:1,[::1]:2")
    assert start().routers == both
    monkeypatch.delenv("PENSTOCK_TOY_ROUTERS")
    (tmp_path / "penstock.toml").write_text("[toy]\nrouters = ['127.0.0.1:1', '[::1]:2']\n")
    assert start().routers == both
    with pytest.raises(ConfigError, match=r"routers = 'a:1,b': write host:port"):
        Settings(routers="a:1,b")  # type: ignore[arg-type]


def test_the_file_can_be_elsewhere(
    start: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("[toy]\nworkers = 9\n")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "mine.toml"))
    assert start().workers == 9


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "0"),
        ("--workers", "x"),
        ("--room", "much"),
        ("--unheard-of", "1"),
        ("--address", "nowhere"),
        ("--peer", "nowhere:123456"),
        ("--routers", "127.0.0.1:1,nowhere"),
    ],
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


def test_an_address_is_text_that_knows_its_parts(
    start: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = HostPort("[::1]:7401")
    assert (address, address.host, address.port, address.at(0)) == ("[::1]:7401", "::1", 7401, "[::1]:0")
    assert HostPort("localhost:80").host == "localhost"
    assert start("--address", "0.0.0.0:1", "--peer", "a.example:2").peer == HostPort("a.example:2")
    monkeypatch.setenv("PENSTOCK_TOY_PEER", "")
    monkeypatch.setenv("PENSTOCK_TOY_ADDRESS", "[::]:0")
    assert (start().peer, start().address) == (None, "[::]:0")
    assert Settings(address="127.0.0.1:9", peer="").address.at(8) == "127.0.0.1:8"  # type: ignore[arg-type]


def test_an_address_may_be_a_unix_socket(start: Callable[..., Settings]) -> None:
    given = start("--address", "unix:/run/a", "--peer", "unix:/run/b", "--routers", "unix:/run/c,127.0.0.1:1")
    assert (given.address, given.address.at(7)) == (UnixPath("unix:/run/a"), UnixPath("unix:/run/a"))
    assert isinstance(given.peer, UnixPath) and given.peer.path == "/run/b"
    assert given.routers == (UnixPath("unix:/run/c"), HostPort("127.0.0.1:1"))
    assert start("--metrics", "127.0.0.1:9").metrics == HostPort("127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"metrics = 'unix:/run/a': write host:port, for example 127.0.0.1:7401$"):
        Settings(metrics="unix:/run/a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("unix:", "write unix:/path"),
        ("unix:relative", "write unix:/path"),
        ("unix:/directory/", "write unix:/path"),
        ("unix:/a\nb", "write unix:/path"),
        ("unix:/" + "ü" * 60, "at most 103 bytes"),
    ],
)
def test_what_is_no_unix_socket_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        socket_address(text)


@pytest.mark.parametrize(
    "text",
    ["", "nowhere", ":80", "host:", "host:http", "host:65536", "host:-1", "::1:80", "a:1:2", "tcp://a:1", "a b:1"],
)
def test_what_is_not_an_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="write host:port"):
        HostPort(text)
    with pytest.raises(
        ConfigError, match=f"^address = {text!r}: write host:port, for example 127.0.0.1:7401, or unix:/path$"
    ):
        Settings(address=text)  # type: ignore[arg-type]


@dataclass
class Figures:
    """What is checked."""

    count: float = 1
    kind: str = "plain"


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_numbers_out_of_bounds(value: float) -> None:
    figures = Figures(value)
    with pytest.raises(ConfigError, match=r"count = .*: must be 1 or more"):
        at_least(figures, 1, "count")
    with pytest.raises(ConfigError, match=r"count = .*: must be more than 0"):
        more_than(figures, 0, "count")
    with pytest.raises(ConfigError, match=r"count = .*: must be 0.5 to 2"):
        within(figures, 0.5, 2, "count")


def test_values_within_bounds_pass() -> None:
    figures = Figures()
    at_least(figures, 1, "count")
    more_than(figures, 0, "count")
    within(figures, 1, 1, "count")
    one_of(figures, ("plain", "lossless"), "kind")
    with pytest.raises(ConfigError, match="kind = 'plain': must be a, b or c"):
        one_of(figures, ("a", "b", "c"), "kind")

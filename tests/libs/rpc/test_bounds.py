"""Every check names the field, shows what is wrong with it, and says what would be right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from penstock.errors import InvalidRequest
from penstock.kv.bounds import check_key, check_keys, check_namespace
from penstock.rpc.bounds import check_address, check_count, check_id, check_name, check_seconds, check_session

KEY = b"k" * 32


@pytest.mark.parametrize(
    "check",
    [
        partial(check_id, value="decode-0:a.b_C"),
        partial(check_id, value="x" * 128),
        partial(check_name, value="x" * 512),
        partial(check_session, value=""),
        partial(check_session, value="f" * 64),
        partial(check_address, value="127.0.0.1:7401"),
        partial(check_address, value="[::1]:7401"),
        partial(check_count, value=[1, 2], most=2),
        partial(check_seconds, value=0.0),
        partial(check_key, value=KEY),
        partial(check_keys, value=[KEY] * 4, most=4),
        partial(check_namespace, value=b""),
        partial(check_namespace, value=b"n" * 16),
    ],
)
def test_what_is_right_passes(check: Callable[..., object]) -> None:
    call(check)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (partial(check_id, value=""), r"field = '': must be 1 to 128 letters"),
        (partial(check_id, value="x" * 129), r"field = 'x{80}\.\.\.': must be 1 to 128 letters"),
        (partial(check_id, value="a\nb"), r"field = 'a\\nb': must be"),
        (partial(check_name, value="x" * 513), "field = 513 characters: must have at most 512"),
        (partial(check_name, value="", least=1), "field = 0 characters: must have 1 to 512"),
        (partial(check_session, value="x" * 65), "field = 65 characters: must have at most 64"),
        (partial(check_address, value="nowhere"), "field = 'nowhere': must be host:port"),
        (partial(check_address, value="127.0.0.1:0"), "field = '127.0.0.1:0': must be host:port"),
        (partial(check_address, value="unix:etc/x"), "field = 'unix:etc/x': must be host:port"),
        (partial(check_address, value="x" * 5000), "field = 5000 characters"),
        (partial(check_count, value=[1, 2, 3], most=2), "field = 3 entries: must have at most 2"),
        (partial(check_seconds, value=-1.0), "field = -1.0: must be a number of seconds, 0 or more"),
        (partial(check_seconds, value=float("nan")), "field = nan"),
        (partial(check_seconds, value=float("inf")), "field = inf"),
        (partial(check_key, value=b"short"), "field = 5 bytes: must have 32"),
        (partial(check_keys, value=[KEY, b"short"]), r"field\[1\] = 5 bytes: must have 32"),
        (partial(check_keys, value=[KEY] * 5, most=4), "field = 5 entries: must have at most 4"),
        (partial(check_namespace, value=b"n"), "field = 1 bytes: must have 0 or 16"),
    ],
)
def test_what_is_wrong_is_named(check: Callable[..., object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}") as caught:
        call(check)
    assert caught.value.field is not None
    assert caught.value.field.startswith("field")


def call(check: Callable[..., object]) -> None:
    """The checks differ in the name of what they check, not in its place."""
    given = dict(check.keywords)  # type: ignore[attr-defined]
    value = given.pop("value")
    check.func("field", value, **given)  # type: ignore[attr-defined]

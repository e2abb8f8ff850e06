"""What `penstock ctl` makes of what it hears: rates of the last minute, an explanation, who agrees with whom."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli import evicting
from penstock.cli.asking import DoorAccess
from penstock.cli.checks import Check, CheckedService, checked_clocks, checked_versions
from penstock.cli.explanation import show
from penstock.cli.frames import drawn
from penstock.errors import InvalidRequest
from penstock.rpc.checkup import own_version
from penstock.rpc.shown.figures import SOURCES, Window, frame_of
from penstock.runtime.addresses import HostPort
from penstock.v1 import common_pb2, router_pb2


def worker(id: str = "w", **counts: Any) -> router_pb2.JoinedMember:
    prompts = router_pb2.PromptSources(**{name: counts.pop(name) for name in SOURCES if name in counts})
    return router_pb2.JoinedMember(
        member_id=id,
        role=router_pb2.ROLE_BOTH,
        address="127.0.0.1:7",
        model_name="m",
        max_running=16,
        counts=router_pb2.WorkerCounts(prompts=prompts, **counts),
    )


def store(**load: Any) -> router_pb2.JoinedMember:
    return router_pb2.JoinedMember(
        member_id="s", role=router_pb2.ROLE_KVSTORE, address="127.0.0.1:8", store=router_pb2.StoreLoad(**load)
    )


def answer(*members: router_pb2.JoinedMember) -> router_pb2.MembersResponse:
    return router_pb2.MembersResponse(members=members)


def written(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_are_those_of_the_last_minute() -> None:
    window = Window(60.0)
    first = window.add(frame_of(answer(worker(computed=900, host=100, generated=10))), 0.0)
    assert first.hit_rates is not None and first.hit_rates["host"] == 0.1 and not first.seconds
    later = window.add(frame_of(answer(worker(computed=910, host=190, generated=40))), 30.0)
    assert later.hit_rates == dict.fromkeys(SOURCES, 0.0) | {"computed": 0.1, "host": 0.9}
    assert (later.seconds, later.generated) == (30.0, 30)
    last = window.add(frame_of(answer(worker(computed=1010, host=190, generated=40))), 80.0)
    assert last.seconds == 50.0, "the first frame counts no more"
    assert last.hit_rates is not None and last.hit_rates["computed"] == 1.0


def test_a_worker_that_started_again_takes_nothing_back() -> None:
    window = Window()
    window.add(frame_of(answer(worker(computed=900, drafted=50, accepted=20))), 0.0)
    done = window.add(frame_of(answer(worker(computed=5), worker("new", host=7))), 1.0)
    assert (done.prompts["computed"], done.prompts["host"], done.drafted) == (0, 7, 0)
    assert done.acceptance is None


def test_json_of_a_frame() -> None:
    tier = router_pb2.TierLoad(tier=common_pb2.TIER_NVME, blocks=2, used_bytes=20, bytes=100, given_blocks=1)
    plain = frame_of(answer(worker(host=30, computed=10, drafted=8, accepted=6), store(tiers=[tier], asked=4))).plain()
    assert plain["total"]["hit_rates"]["host"] == 0.75 and plain["total"]["acceptance"] == 0.75
    assert plain["workers"][0]["hit_rates"]["computed"] == 0.25
    [found] = plain["stores"]
    assert found["hit_rate"] == 1.0
    assert found["tiers"] == [
        {"tier": "nvme", "blocks": 2, "used_bytes": 20, "bytes": 100, "given_blocks": 1, "evictions": 0}
    ]
    assert frame_of(answer()).plain()["total"]["hit_rates"] is None


def test_a_frame_shows_a_mesh_without_anything() -> None:
    frame = frame_of(answer(worker(), store()))
    text = written(drawn(frame, frame.since_start()))
    assert "no prompts" in text and "no drafts" in text and "127.0.0.1:7" in text and "127.0.0.1:8" in text


RECORD: dict[str, Any] = {
    "request_id": "r1",
    "tenant": "t",
    "status": "completed",
    "error": None,
    "model": "m",
    "tokens": {
        "prompt": 100,
        "computed": 40,
        "cached": {"worker": 10, "gpu": 0, "host": 50, "nvme": 0, "remote": 0},
        "completion": 9,
        "drafted": 8,
        "accepted": 5,
    },
    "replans": 1,
    "times": dict.fromkeys(
        ("body", "tokenize", "plan", "call", "queue", "fetch", "prefill", "handoff", "decode", "send"), 0.1
    )
    | {"first_token": 0.7, "total": 1.0},
    "choices": [
        {
            "index": 0,
            "attempts": [
                {
                    "at": 0.1,
                    "plan": "p/1",
                    "prefill": {"worker": "a", "other_stores": 0},
                    "decode": {"worker": "b", "other_stores": 0},
                    "reasons": {"held_s": 0.05},
                    "lost": {
                        "at": 0.5,
                        "stage": "decode",
                        "worker": "b",
                        "silent": True,
                        "type": "server_error",
                        "message": "it [is] gone",
                    },
                },
                {
                    "at": 0.6,
                    "plan": "p/2",
                    "prefill": None,
                    "decode": {"worker": "c", "other_stores": 0},
                    "reasons": {"held_s": 0.0, "first_token_s": 0.2, "answer_s": 0.4, "cached_tokens": 60},
                    "lost": None,
                },
            ],
        }
    ],
}


def option(**fields: Any) -> dict[str, Any]:
    names = ("total", "queue", "ahead", "compute", "fetch", "pull", "penalty", "handoff", "room", "decode", "others")
    tokens = ("resident", "store", "awaited", "remote", "uncached")
    zeros = {f"{name}_s": 0.0 for name in names} | {f"{name}_tokens": 0 for name in tokens}
    return zeros | {"prefill": "", "decode": "b"} | fields


def test_an_explanation_says_why_and_where_the_time_went() -> None:
    plan = {
        "options": [
            option(prefill="a", total_s=0.5, queue_s=0.2, compute_s=0.3, others_s=0.1, store_tokens=50),
            option(decode="c", total_s=0.9, compute_s=0.9, uncached_tokens=100),
        ],
        "looked_at": 5,
        "choices": 7,
        "sources": ["h2:7"],
    }
    found = {"request": RECORD, "plans": {"p/1": plan}, "members": {"a": "h1:1", "b": "h1:2", "c": "h1:3"}}
    console = Console(file=io.StringIO(), width=200)
    show(found, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for says in (
        "prompt 100 tokens: 40 computed, 10 from worker, 50 from host",
        "5 of 8 drafts accepted; moved 1 time to other workers",
        "held back in the router's line for 0.050 s",
        "plan 1 after 0.100 s: prompt at h1:1, answer at h1:2",
        "3 dearer ones that were looked at are left out; 7 workers could have decoded it",
        "from the stores of other hosts at h2:7",
        "lost after 0.500 s in decode: h1:2, of which the router hears nothing either: it [is] gone",
        "plan 2 after 0.600 s: prompt and answer at h1:3",
        "expected 0.2000 s to the first token, 0.4000 s in all, 60 tokens cached",
    ):
        assert says in text, says
    [chosen] = [line for line in text.splitlines() if line.strip().startswith("chosen")]
    assert "h1:1" in chosen and "0.6000" in chosen, "its cost is what it takes and what others lose"
    assert "pull" not in text, "parts that are nothing anywhere are left out"


def test_versions_that_differ_are_named() -> None:
    same = [
        CheckedService("router r", version=own_version()),
        CheckedService("decode d", version=own_version()),
        CheckedService("dead x"),
    ]
    [check] = checked_versions(same)
    assert check.ok and own_version() in check.found
    [check] = checked_versions([*same, CheckedService("prefill p", version="0.0+wire.old")])
    assert not check.ok and "0.0+wire.old: prefill p" in check.found and "drain" in check.advice
    assert checked_versions([CheckedService("dead x")]) == []


@pytest.mark.parametrize(("ahead", "way", "ok"), [(0.4, 0.01, True), (1.5, 0.01, False), (1.5, 0.4, True)])
def test_clocks_that_differ_are_named(ahead: float, way: float, ok: bool) -> None:
    here = CheckedService("router r", version="v", ahead_s=0.0, way_s=way)
    there = CheckedService("decode d", version="v", ahead_s=ahead, way_s=way)
    [check] = checked_clocks([here, there, CheckedService("dead", ahead_s=99.0)])
    assert check.ok is ok
    assert ok or check.found == "decode d is 1.500 s ahead of router r"


def test_advice_is_for_problems() -> None:
    assert Check("a", "b", True, "c", "d").plain()["advice"] == ""
    assert Check("a", "b", False, "c", "d").plain()["advice"] == "d"


def test_an_eviction_that_not_all_answered_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = {"tier": "host", "blocks": 3, "bytes": 3 << 20, "in_use": 1}
    deaf = {"id": "d", "address": "h:2", "role": "decode", "answered": False, "tiers": []}
    there = {"id": "s", "address": "h:1", "role": "kvstore", "answered": True, "tiers": [tier]}
    for members, code in (([there], 0), ([there, deaf], 1)):

        async def evicted(*_: Any, members: Any = members) -> Any:
            return {"tenant": "t", "blocks": 3, "bytes": 3 << 20, "in_use": 1, "members": members}

        monkeypatch.setattr(evicting, "_evict", evicted)
        assert evicting.evict(tenant="t") == code
        shown = capsys.readouterr().out
        assert "3 blocks of t are dropped, 1 of them in use" in shown
        assert ("not all members have answered" in shown) is bool(code)


@pytest.mark.parametrize(
    ("door", "access", "sent"),
    [
        ({"address": "127.0.0.1:9"}, {}, True),
        ({"address": "10.0.0.7:9", "tls": True}, {}, True),
        ({"address": "10.0.0.7:9"}, {"gateway": "10.0.0.7:9"}, True),
        ({"address": "10.0.0.7:9"}, {"ca": Path("ca.pem")}, True),
        ({"address": "10.0.0.7:9"}, {"gateway": "10.0.0.8:9"}, False),
        ({"address": "10.0.0.7:9"}, {}, False),
    ],
)
def test_a_key_goes_to_no_gateway_in_clear_that_only_a_router_knows(
    door: dict[str, Any], access: dict[str, Any], sent: bool
) -> None:
    if "gateway" in access:
        access = {"gateway": (HostPort(access["gateway"]),)}
    where = router_pb2.MeshWatcher(**door)
    if sent:
        assert DoorAccess(key="k", **access).metadata(where) == (("authorization", "Bearer k"),)
    else:
        with pytest.raises(InvalidRequest, match=r"the key is not sent to 10\.0\.0\.7:9, which speaks no TLS"):
            DoorAccess(key="k", **access).metadata(where)
    assert DoorAccess(**access).metadata(where) == ()

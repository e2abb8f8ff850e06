"""GET /v1/requests/{id}: what became of a request, for its tenant and the operator alone; the last ones only."""

from __future__ import annotations

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.gateway.accounts.keys import new_key, write_keys
from penstock.gateway.completing.past import PastRequests

from . import fakes

BODY = {"model": fakes.MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def ended(http, setup, headers=None, **more):
    return await http.post(f"{setup.url}/v1/chat/completions", json=BODY | more, headers=headers or {})


async def told(http, setup, id, headers=None):
    return await http.get(f"{setup.url}/v1/requests/{id}", headers=headers or {})


@pytest.fixture
async def http():
    async with httpx2.AsyncClient() as client:
        yield client


async def test_what_became_of_a_request(setup, http):
    setup.script.cached = {"host": 8, "nvme": 4}
    answer = await ended(http, setup, {"x-request-id": "mine-1"}, n=2)
    by_request, by_response = [(await told(http, setup, id)).json() for id in ("mine-1", answer.json()["id"])]
    assert by_request == by_response
    usage = answer.json()["usage"]
    found = by_request
    assert (found["request_id"], found["tenant"], found["status"], found["error"]) == (
        "mine-1",
        "default",
        "completed",
        None,
    )
    assert found["tokens"]["prompt"] == usage["prompt_tokens"]
    assert found["tokens"]["completion"] == usage["completion_tokens"]
    assert found["tokens"]["cached"] == usage["penstock"]["cached_tokens"]
    assert found["tokens"]["computed"] == usage["penstock"]["computed_tokens"]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["stop", "stop"]
    steps = [step["what"] for step in found["timeline"]]
    assert steps == ["body", "plan 1 asked", "plan 1 made", "first_token", "last_token", "end"]
    times = [step["at"] for step in found["timeline"]]
    assert times == sorted(times) and times[-1] == found["times"]["total"]


async def test_the_plan_and_its_reasons(setup, http):
    await ended(http, setup, {"x-request-id": "planned"})
    [choice] = (await told(http, setup, "planned")).json()["choices"]
    [attempt] = choice["attempts"]
    assert (attempt["prefill"]["worker"], attempt["decode"]["worker"]) == ("prefill-0", "decode-0")
    assert attempt["reasons"] == fakes.REASONS
    assert "127.0.0.1" not in str(attempt), "where workers are is no client's business"


async def test_a_request_that_moved(setup, http):
    setup.script.decode_dies_after = 2
    await ended(http, setup, {"x-request-id": "moved"})
    found = (await told(http, setup, "moved")).json()
    assert found["status"] == "completed" and found["replans"] == 1
    first, second = found["choices"][0]["attempts"]
    assert (first["lost"]["stage"], first["lost"]["worker"]) == ("decode", "decode-0")
    assert second["decode"]["worker"] == "decode-1" and second["tokens_before"] >= 2
    assert [step["what"] for step in found["timeline"]].count("plan 1 lost") == 1


async def test_a_request_that_failed(setup, http):
    setup.script.refuse = InvalidRequest("no such thing", code="odd")
    assert (await ended(http, setup, {"x-request-id": "failed"})).status_code == 400
    found = (await told(http, setup, "failed")).json()
    assert found["status"] == "failed"
    assert found["error"] == {"type": "invalid_request_error", "code": "odd", "message": "no such thing"}
    assert found["choices"][0]["attempts"] == []


async def test_other_tenants_see_nothing(opened, http, tmp_path):
    file = tmp_path / "keys.json"
    keys = (("one", "a", "client"), ("two", "b", "client"), ("op", "ops", "operator"))
    write_keys(file, [new_key(tenant, role, key=key)[1] for key, tenant, role in keys])
    async with opened(api_keys=file, server_key="ab" * 16) as setup:
        one, two, op = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "op"))
        answer = (await ended(http, setup, one | {"x-request-id": "same"})).json()
        await ended(http, setup, two | {"x-request-id": "same"})
        for id in ("same", answer["id"]):
            assert (await told(http, setup, id, one)).json()["tenant"] == "a"
        assert (await told(http, setup, "same", two)).json()["tenant"] == "b"
        assert (await told(http, setup, answer["id"], two)).status_code == 404
        assert (await told(http, setup, answer["id"], op)).json()["tenant"] == "a"
        assert (await told(http, setup, answer["id"])).status_code == 401
        missing = await told(http, setup, "chatcmpl-none", op)
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"


def test_the_oldest_are_forgotten_by_number():
    past = PastRequests(2, 1000)
    for number in range(4):
        past.add("a", "same", str(number), b"record %d" % number)
    assert len(past) == 2 and past.bytes == 2 * len(b"record 0")
    assert past.find("0", None) is None and past.find("1", "a") is None
    assert past.find("same", "a") == past.find("chatcmpl-3", "a") == b"record 3"


def test_the_oldest_are_forgotten_by_bytes():
    past = PastRequests(100, 10)
    for number in range(50):
        past.add("a", f"r{number}", str(number), b"x" * 6)
        assert past.bytes == 6 and past.find(f"r{number}", "a")
    assert past.find("r48", None) is None and len(past) == 1
    [own] = past._tenants.values()
    assert len(own.names) == len(own.kept) == 1


def test_a_flood_of_one_tenant_pushes_out_its_own_records_alone():
    past = PastRequests(10, 10_000)
    for number in range(3):
        past.add("quiet", f"q{number}", f"quiet {number}", b"x")
    for number in range(1000):
        past.add("loud", "always", f"loud {number}", b"x")
    assert len(past) == 10 and past.find("loud 992", "loud") is None and past.find("loud 993", "loud")
    assert all(past.find(f"q{number}", "quiet") for number in range(3))
    for number in range(3, 9):
        past.add("quiet", f"q{number}", f"quiet {number}", b"x")
    assert [bool(past.find(f"q{number}", "quiet")) for number in range(9)] == [False] * 4 + [True] * 5
    assert past.find("always", None) == b"x" and past.find("loud 994", "loud") is None


def test_who_has_most_bytes_loses_where_bytes_are_short():
    past = PastRequests(100, 100)
    for number in range(20):
        past.add("many", f"m{number}", f"many {number}", b"x")
    for number in range(4):
        past.add("large", f"l{number}", f"large {number}", b"x" * 30)
    assert past.bytes == 80 and past.find("m0", "many") and past.find("l1", None) is None and past.find("l2", None)
    past.add("huge", "h", "huge", b"x" * 200)
    assert past.find("h", "huge") and (len(past), past.bytes) == (1, 200), "the newest stays"
    past.add("many", "last", "last", b"x")
    assert past.find("h", None) is None and past.find("last", "many") and past.bytes == 1


def test_among_equals_the_oldest_goes_first():
    past = PastRequests(4, 100)
    for number in range(50):
        past.add(f"t{number}", "same", str(number), b"%d" % number)
        assert past.find("same", None) == b"%d" % number
    assert [past.find(str(number), None) for number in range(45, 50)] == [None, b"46", b"47", b"48", b"49"]
    assert len(past._tenants) == 4


def test_nothing_is_remembered_when_that_is_the_setting():
    past = PastRequests(0, 1000)
    past.add("a", "r", "1", b"x")
    assert len(past) == 0 and past.find("r", "a") is None


def test_a_request_that_is_sent_again_has_one_record():
    """Its answer has the same id each time: the last record stands for it, whatever the others were called."""
    past = PastRequests(3, 1000)
    past.add("a", "other", "other", b"other")
    for number in range(10):
        past.add("a", f"r{number}", "same", b"record %d" % number)
        assert len(past) == 2 and past.bytes == len(b"other") + len(b"record 0")
    assert past.find("same", None) == past.find("r9", "a") == b"record 9"
    assert past.find("r0", "a") is None and past.find("other", "a") == b"other"
    for number in range(5):
        past.add("b", "r", str(number), b"x")
    assert len(past) == 3 and past.find("r9", "a") == b"record 9"


ADDED = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 25)), max_size=60)


@given(st.integers(1, 8), st.integers(1, 60), ADDED)
def test_what_is_kept_is_what_a_plain_list_keeps(most, most_bytes, added):
    past, kept = PastRequests(most, most_bytes), []
    for number, (tenant, size) in enumerate(added):
        past.add(tenant, "same", str(number), b"x" * size)
        kept.append((tenant, number, size))
        while len(kept) > most or (sum(size for _, _, size in kept) > most_bytes and len(kept) > 1):
            kept.remove(_loses(kept, most, most_bytes))
        assert {number for _, number, _ in kept} == {
            number for number in range(len(added)) if past.find(str(number), None) is not None
        }
    assert len(past) == len(kept) and past.bytes == sum(size for _, _, size in kept)


def _loses(kept, most, most_bytes):
    """The oldest of the tenant with the largest share."""

    def share(tenant):
        sizes = [size for owner, _, size in kept if owner == tenant]
        return max(len(sizes) / most, sum(sizes) / most_bytes)

    oldest = {tenant: (tenant, number, size) for tenant, number, size in reversed(kept)}
    return max((one for one in oldest.values() if one != kept[-1]), key=lambda one: (share(one[0]), -one[1]))

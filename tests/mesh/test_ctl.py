"""`penstock ctl` from outside, as processes, on meshes that serve: what it shows agrees with what was done."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable

import pytest

from penstock.engine.request import SamplingParams
from penstock.gateway.accounts.keys import new_key, write_keys
from penstock.rpc.shown.figures import SOURCES
from penstock.testing.mesh import Mesh, MeshSetup

from .support import BLOCK, DRAFTING, ask, drafting, prompt, settled, until

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SESSION = "a name that nobody else should see"
WIDE = {"COLUMNS": "240"}


@pytest.fixture(scope="module")
async def mesh(tiny, meshes):
    async with meshes(MeshSetup(model=tiny, decode=2)) as mesh:
        yield mesh


def command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "penstock.cli", "ctl", *arguments)


async def ctl(*arguments, exit_code=0, **environment):
    """What the command prints, on whichever stream."""
    child = await asyncio.create_subprocess_exec(
        *command(*arguments), stdout=PIPE, stderr=PIPE, env=os.environ | WIDE | environment
    )
    out, err = await child.communicate()
    assert child.returncode == exit_code, out.decode() + err.decode()
    return out.decode() or err.decode()


def told(mesh: Mesh, fact: Callable) -> bool:
    """Whether the router has heard what makes `fact` true of its answer."""
    router = mesh.router
    return fact(router.shown.members(router.director.members()))


async def told_prompts(mesh: Mesh, tokens: int) -> None:
    """Returns when the router has heard of so many tokens of prompts."""

    def fact(answer):
        sources = [one.counts.prompts for one in answer.members]
        return sum(getattr(one, name) for one in sources for name in SOURCES) == tokens

    await until(lambda: told(mesh, fact), "the workers have told what they did")


async def test_top_shows_what_was_done(tiny, meshes, http):
    tokens = prompt("ctl/top", 12 * BLOCK + 5)
    async with meshes(MeshSetup(model=tiny)) as mesh:
        first = await ask(http, mesh, tokens, SHORT, session=SESSION)
        await settled(mesh, tokens[: 12 * BLOCK])
        second = await ask(http, mesh, tokens, SHORT, session=SESSION)
        await told_prompts(mesh, 2 * len(tokens))
        blocks = mesh.kvstore.stats().blocks
        await until(
            lambda: told(mesh, lambda answer: any(one.tiers[0].blocks == blocks for one in stores(answer))),
            "the store has told what it has",
        )
        found = json.loads(await ctl("top", "--json", "--router", mesh.router.address))
        table = await ctl("top", "--once", "--router", mesh.router.address)
    total, cached = found["total"], second.usage["penstock"]["cached_tokens"]
    assert total["prompt_tokens"]["computed"] == first.computed + second.computed
    assert {tier: total["prompt_tokens"][tier] for tier in cached} == cached
    assert total["hit_rates"]["computed"] == round((first.computed + second.computed) / 2 / len(tokens), 4)
    assert sum(total["hit_rates"].values()) == pytest.approx(1, abs=0.001)
    drafted, accepted = (sum(getattr(one, name) for one in (first, second)) for name in ("drafted", "accepted"))
    assert (total["drafted_tokens"], total["accepted_tokens"]) == (drafted, accepted)
    assert total["acceptance"] == (round(accepted / drafted, 4) if drafted else None)
    assert total["generated_tokens"] >= 16 and total["running"] == total["waiting"] == 0
    assert (found["sessions"], found["requests"]) == (1, 0) and found["indexed_blocks"] >= 12
    assert [one["role"] for one in found["workers"]] == ["prefill", "decode"]
    for one in found["workers"]:
        assert one["queue_s"] == 0 and one["max_running"] > 0 and 0 <= one["kv_usage"] <= 1
        assert one["resident_bytes"] > one["resident_blocks"] > 0
    [store] = found["stores"]
    assert store["tiers"][0]["tier"] == "host" and store["tiers"][0]["blocks"] == blocks
    assert store["hit_rate"] is None or 0 <= store["hit_rate"] <= 1
    [gateway] = found["gateways"]
    assert gateway["http_address"] == mesh.gateway.address and gateway["address"] == mesh.gateway.grpc_address
    for one in (*found["workers"], *found["stores"]):
        assert one["address"] in table
    assert SESSION not in json.dumps(found) + table


def stores(answer):
    return [one.store for one in answer.members if one.HasField("store") and one.store.tiers]


async def test_a_draft_service_is_seen_and_drops_what_a_tenant_had(tiny, meshes, http):
    tokens = prompt("ctl/draft", 12 * BLOCK + 5)
    async with meshes(MeshSetup(model=tiny, draft=str(tiny), engine=DRAFTING)) as mesh:
        await drafting(http, mesh)
        answer = await ask(http, mesh, tokens, SHORT)
        assert answer.accepted

        def heard(answer):
            return answer.drafts and answer.drafts[0].load.computed >= len(tokens)

        await until(lambda: told(mesh, heard), "the draft service has told what it did")
        [found] = json.loads(await ctl("top", "--json", "--router", mesh.router.address))["drafts"]
        assert found["address"] == mesh.draft.address and found["model"] == tiny.name
        assert found["workers"] == 1 and found["guessed_tokens"] >= answer.accepted > 0 and found["busy_s"] > 0
        assert found["address"] in await ctl("top", "--once", "--router", mesh.router.address)
        checks = await examined("--router", mesh.router.address)
        assert any(one["where"] == f"draft {mesh.draft.address}" and one["ok"] for one in checks)
        evict = ("evict", "--tenant", "default", "--json", "--router", mesh.router.address)
        members = {one["role"]: one for one in json.loads(await ctl(*evict))["members"]}
        assert set(members) == {"prefill", "decode", "kvstore", "draft"}
        [pages] = members["draft"]["tiers"]
        assert pages["tier"] == "worker" and pages["blocks"] >= 12
        members = {one["role"]: one for one in json.loads(await ctl(*evict))["members"]}
        assert members["draft"]["tiers"][0]["blocks"] == 0


async def test_top_goes_on_until_it_is_interrupted(mesh):
    child = await asyncio.create_subprocess_exec(
        *command("top", "--every-s", "0.1", "--router", mesh.router.address),
        stdout=PIPE,
        env=os.environ | WIDE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background would ignore it
    )
    text = ""
    async with asyncio.timeout(60):
        while "since the start" not in text or "in 0 s" not in text:
            text += (await child.stdout.readline()).decode()
    child.send_signal(signal.SIGINT)
    await child.communicate()
    assert child.returncode == 0


async def test_what_top_cannot_do(mesh):
    assert "--every-s = 0.0: must be 0.1 or more" in await ctl(
        "top", "--every-s", "0", "--router", mesh.router.address, exit_code=2
    )
    assert "failed to connect" in (await ctl("top", "--router", "127.0.0.1:1", exit_code=1)).lower()


async def test_sessions_are_shown_by_their_digests(mesh, http):
    tokens = prompt("ctl/session", 5 * BLOCK + 3)
    await ask(http, mesh, tokens, SHORT, session=SESSION)
    await settled(mesh, tokens[: 5 * BLOCK])
    plain = await ctl("sessions", "--json", "--router", mesh.router.address)
    [one] = [one for one in json.loads(plain)["sessions"] if one["prompt_tokens"] == len(tokens)]
    assert (one["tenant"], one["model"], one["answer_tokens"]) == ("default", "tiny", 8)
    assert one["cached_tokens"] == 5 * BLOCK and one["requests"] == 1 and one["age_s"] < 60
    assert re.fullmatch("[0-9a-f]{32}", one["session"])
    assert one["decode"] in {served.address for served in mesh.decode}
    table = await ctl("sessions", "--tenant", "default", "--router", mesh.router.address)
    assert one["session"] in table and SESSION not in plain + table
    assert (
        json.loads(await ctl("sessions", "--json", "--tenant", "x", "--router", mesh.router.address))["sessions"] == []
    )


async def test_explain_says_why_there_and_where_the_time_went(mesh, http):
    tokens = prompt("ctl/explain", 8 * BLOCK + 1)
    await ask(http, mesh, tokens, SHORT)
    await settled(mesh, tokens[: 8 * BLOCK])
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 5}
    answer = await http.post(f"{mesh.url}/v1/completions", json=body, headers={"x-request-id": "explain-me"})
    usage = answer.json()["usage"]
    found = json.loads(await ctl("explain", "explain-me", "--json", "--router", mesh.router.address))
    record = found["request"]
    assert record["tokens"]["cached"] == usage["penstock"]["cached_tokens"]
    assert record["times"] == pytest.approx(usage["penstock"]["times"], abs=1.0)
    [attempt] = record["choices"][0]["attempts"]
    plan = found["plans"][attempt["plan"]]
    chosen, *others = plan["options"]
    assert chosen["decode"] == attempt["decode"]["worker"]
    assert plan["choices"] == 2 and len(plan["options"]) >= 1
    assert chosen["total_s"] == pytest.approx(attempt["reasons"]["answer_s"])
    assert all(chosen["total_s"] + chosen["others_s"] <= one["total_s"] + one["others_s"] + 1e-9 for one in others)
    assert found["members"][chosen["decode"]] in {served.address for served in mesh.decode}
    text = await ctl("explain", answer.json()["id"], "--gateway", mesh.gateway.grpc_address)
    assert "request explain-me, tenant default, completed" in text and "where the time went" in text
    assert "the router does not remember" in text, "it was not asked"
    text = await ctl("explain", "explain-me", "--router", mesh.router.address)
    assert "chosen" in text and found["members"][chosen["decode"]] in text


async def test_a_request_that_is_not_known(mesh):
    said = await ctl("explain", "nobody", "--router", mesh.router.address, exit_code=1)
    assert "the request 'nobody' is not known here" in said
    assert "the last 1024 that have ended, in 8MiB at most" in said and "are kept now, the oldest for" in said


@pytest.fixture
async def guarded(tiny, meshes, tmp_path):
    """A mesh of two tenants and an operator."""
    file = tmp_path / "keys.json"
    keys = (("key-a", "a", "client"), ("key-b", "b", "client"), ("key-op", "ops", "operator"))
    write_keys(file, [new_key(tenant, role, key=key)[1] for key, tenant, role in keys])
    async with meshes(MeshSetup(model=tiny, gateway={"api_keys": file, "server_key": "ab" * 16})) as mesh:
        yield mesh


async def test_evict_drops_one_tenants_blocks_and_is_the_operators(guarded, http, tmp_path):
    mesh, tokens = guarded, prompt("ctl/evict", 10 * BLOCK + 2)
    (tmp_path / "op").write_text("key-op\n")

    async def cached(key):
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 2}
        answer = await http.post(f"{mesh.url}/v1/completions", json=body, headers={"x-api-key": key})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def evict(tenant, **more):
        return await ctl("evict", "--tenant", tenant, "--json", "--router", mesh.router.address, **more)

    for key in ("key-a", "key-b"):
        assert await cached(key) == 0
    for key in ("key-a", "key-b"):
        await until_cached(cached, key, 10 * BLOCK)
    assert "operator's key" in await evict("a", exit_code=1, PENSTOCK_CTL_KEY="key-a")
    assert "API key" in await evict("a", exit_code=1)
    assert await cached("key-a") == 10 * BLOCK, "nobody else may do that"
    found = json.loads(await evict("a", PENSTOCK_CTL_KEY="key-op"))
    assert {one["role"]: one["answered"] for one in found["members"]} == {
        "prefill": True,
        "decode": True,
        "kvstore": True,
    }
    assert found["blocks"] >= 20 and found["in_use"] == 0, "in the workers' pages, and in the store"
    assert await cached("key-b") >= 10 * BLOCK, "those of others stay"
    assert await cached("key-a") == 0
    key_file = str(tmp_path / "op")
    shown = await ctl("evict", "--tenant", "nobody", "--key-file", key_file, "--router", mesh.router.address)
    assert "0 blocks of nobody are dropped" in shown


async def until_cached(cached, key, tokens):
    """Asks until the tenant's blocks have arrived where they are found."""
    async with asyncio.timeout(30):
        while await cached(key) < tokens:
            pass


async def test_without_keys_there_is_one_tenant(mesh):
    said = await ctl("evict", "--tenant", "x", "--router", mesh.router.address, exit_code=1)
    assert "tenant = 'x': must be 'default'" in said


async def examined(*arguments, **environment):
    """The checks of doctor, whose exit status says whether all are well."""
    child = await asyncio.create_subprocess_exec(
        *command("doctor", "--json", *arguments), stdout=PIPE, env=os.environ | environment
    )
    out, _ = await child.communicate()
    found = json.loads(out)
    assert child.returncode == (0 if found["ok"] else 1)
    assert found["ok"] == all(one["ok"] for one in found["checks"])
    return found["checks"]


async def test_doctor_looks_at_all_of_a_mesh(mesh):
    checks = await examined("--router", mesh.router.address)
    seen = {(one["where"].partition(" ")[0], one["check"]): one for one in checks}
    for where, check in (
        ("this", "shared memory"),
        ("router", "address"),
        ("prefill", "kernels"),
        ("decode", "store"),
        ("kvstore", "memory"),
        ("gateway", "credentials"),
        ("mesh", "versions"),
        ("mesh", "clocks"),
        ("mesh", "workers"),
    ):
        assert (where, check) in seen, (where, check)
    bad = [one for one in checks if not one["ok"] and one["check"] not in ("open files", "shared memory", "kernels")]
    assert bad == [], "those are the machine's"
    text = await ctl_any("doctor", "--router", mesh.router.address)
    assert text.count("ok ") >= len(checks) - 9 and "checks" in text


async def ctl_any(*arguments):
    child = await asyncio.create_subprocess_exec(*command(*arguments), stdout=PIPE, env=os.environ | WIDE)
    out, _ = await child.communicate()
    return out.decode()


async def test_doctor_says_what_to_do(guarded, tmp_path):
    address = guarded.router.address
    checks = await examined("--router", f"{address},127.0.0.1:1,no-such-host.invalid:7", "--also", "127.0.0.1:2")
    problems = {(one["where"], one["check"]): one for one in checks if not one["ok"]}
    assert "start it, or correct --router" in problems["router 127.0.0.1:1", "address"]["advice"]
    assert "is not known" in problems["router no-such-host.invalid:7", "address"]["found"]
    assert ("service 127.0.0.1:2", "address") in problems
    door = f"gateway {guarded.gateway.grpc_address}"
    assert "PENSTOCK_CTL_KEY" in problems[door, "credentials"]["advice"]
    refused = await examined("--router", address, PENSTOCK_CTL_KEY="key-a")
    assert [one["ok"] for one in refused if (one["where"], one["check"]) == (door, "credentials")] == [False]
    accepted = await examined("--router", address, PENSTOCK_CTL_KEY="key-op")
    assert [one["ok"] for one in accepted if (one["where"], one["check"]) == (door, "credentials")] == [True]
    missing = await examined("--router", address, "--key-file", str(tmp_path / "none"))
    assert any("cannot be read" in one["found"] for one in missing if one["check"] == "credentials")


async def test_doctor_sees_a_mesh_without_workers(tiny):
    from penstock.router.config import RouterConfig
    from penstock.router.service import open_router

    async with open_router(RouterConfig(state="redis://:secret@127.0.0.1:1/0", name="r")) as router:
        checks = await examined("--router", router.address)
    problems = {one["check"]: one for one in checks if not one["ok"]}
    assert {"workers", "stores", "gateways", "redis"} <= set(problems)
    assert "secret" not in json.dumps(checks)

"""A mesh whose members show each other certificates: it serves as any other, and strangers get nowhere."""

from __future__ import annotations

import json
from functools import partial

import grpc
import pytest

from penstock.cli import authority
from penstock.engine.request import SamplingParams
from penstock.errors import Forbidden
from penstock.rpc.channels import open_channels
from penstock.rpc.errors import from_rpc
from penstock.rpc.identity import MemberIdentity
from penstock.testing.mesh import MeshSetup
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

from .support import BLOCK, ask, forget_pages, on_host, prompt, settled
from .test_ctl import ctl

pytestmark = pytest.mark.attack


GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def issue(tmp_path_factory):
    """Makes a member's directory, by role, name and hosts."""
    directory = tmp_path_factory.mktemp("identity")
    authority.init(directory=directory / "ca")

    def issue(role, name="", *hosts):
        out = directory / (name or role)
        authority.issue(role, name or role, directory=directory / "ca", out=out, hosts=hosts)
        return out

    return issue


@pytest.fixture(scope="module")
async def mesh(tiny, other, meshes, issue):
    setup = MeshSetup(model=tiny, draft=str(other), decode=2, hosts=2, members=partial(issue), router={"pull_s": 0.0})
    async with meshes(setup) as mesh:
        yield mesh


async def test_the_tokens_are_those_of_one_process(mesh, http, oracle):
    """With a hand-off from one host to the other, drafts, and blocks from the other host's store."""
    for host in ("test", "test-1"):
        on_host(mesh, host)
        for number in range(2):
            tokens = prompt(f"identity/{number}", 9 * BLOCK + 5)
            expected = await oracle(tokens, GREEDY)
            first = await ask(http, mesh, tokens, GREEDY)
            assert first.ids == expected.ids
            await settled(mesh, tokens[: 9 * BLOCK])
            await forget_pages(mesh)
            assert (await ask(http, mesh, tokens, GREEDY)).ids == expected.ids
    assert any(store.elsewhere.figures()["pulled_blocks"] for store in mesh.kvstores), "stores speak to each other"


async def test_operators_see_the_mesh_and_nobody_else(mesh, issue):
    router = ("--router", mesh.router.address)
    found = json.loads(await ctl("top", "--json", *router, "--member-tls", str(issue("operator"))))
    assert len(found["workers"]) == 3
    assert "may not be called by a worker" in await ctl(
        "top", "--json", *router, "--member-tls", str(issue("worker")), exit_code=1
    )
    await ctl("top", "--json", *router, exit_code=1)
    checks = json.loads(await ctl("doctor", "--json", *router, "--member-tls", str(issue("operator"))))
    assert {check["check"] for check in checks["checks"] if not check["ok"]} <= {"memory", "disk", "limits", "kernels"}
    said = await ctl("top", *router, "--member-tls", "nowhere", exit_code=2)
    assert "member_tls = 'nowhere': must be a directory with ca.crt, tls.crt and tls.key" in said


@pytest.mark.parametrize(
    ("role", "hosts", "hello", "why"),
    [
        ("worker", (), {"role": router_pb2.ROLE_KVSTORE}, "hello.role = kvstore: needs a certificate of a store"),
        ("store", (), {"role": router_pb2.ROLE_DECODE}, "hello.role = decode: needs a certificate of a worker"),
        ("gateway", (), {"role": router_pb2.ROLE_DECODE}, "may not be called by a gateway"),
        ("store", ("10.0.0.7",), {"role": router_pb2.ROLE_KVSTORE}, "the certificate of elsewhere is for 10.0.0.7"),
    ],
)
async def test_who_joins_is_what_its_certificate_says(mesh, issue, role, hosts, hello, why):
    member = MemberIdentity(issue(role, "elsewhere", *hosts))
    spec = common_pb2.KvSpec(model="m", block_size=16, block_bytes=64)
    rest = {"model_name": "m", "max_model_len": 64, "max_running": 1, "kv_capacity_tokens": 64, "spec": spec}
    asked = router_pb2.Hello(member_id="stranger", address="127.0.0.1:9", **hello, **rest)
    async with open_channels(member) as channels:
        call = router_pb2_grpc.RouterStub(channels.to(mesh.router.address, "router")).Join(
            iter([router_pb2.JoinRequest(hello=asked)])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
            await call.read()
    error = from_rpc(caught.value)
    assert isinstance(error, Forbidden)
    assert why in error.message

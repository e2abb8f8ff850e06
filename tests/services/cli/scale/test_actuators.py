"""Actuators before real HTTP servers: what they ask for, and that nothing is done twice."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.scale.actuators.base import ActuatorFailed, WorkerPlace
from penstock.cli.scale.actuators.kubernetes import KubernetesAccess, KubernetesActuator
from penstock.cli.scale.actuators.webhook import WebhookActuator, WebhookTarget

from .servers import ApiServer, Heard, serving

WORKER = WorkerPlace("member-2", "10.0.0.2:7500")
KEY = b"0123456789abcdef"


def access(url: str, tmp_path: Path, **other: Any) -> KubernetesAccess:
    token = tmp_path / "token"
    token.write_text("a token\n")
    fields = {"namespace": "prod", "resource": "deployments", "name": "workers", "ca": None, "most": 20} | other
    return KubernetesAccess(api=url, token_file=token, **fields)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[ApiServer, KubernetesActuator]]:
    server = ApiServer()
    with serving(server) as url:
        yield server, KubernetesActuator(access(url, tmp_path))


async def test_the_scale_of_a_deployment_is_patched_and_the_drained_pod_goes_first(cluster) -> None:
    server, actuator = cluster
    await actuator.add("prefill")
    assert server.replicas == 4
    await actuator.remove(WORKER)
    assert server.replicas == 3
    assert list(server.costs) == ["worker-abc-2"] and int(server.costs["worker-abc-2"]) < 0
    methods = [(heard.method, heard.path) for heard in server.heard]
    assert methods.index(("PATCH", f"{server.PODS}/worker-abc-2")) < len(methods) - 1, "before there is one less"


async def test_who_is_taken_away_last_goes_first(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that was marked may have stayed, and work again."""
    server, actuator = cluster
    for now, place in ((1.8e9, WORKER), (1.8e9 + 700, WorkerPlace("member-1", "10.0.0.1:7500"))):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        await actuator.remove(place)
    first, last = server.costs.values()
    assert int(last) < int(first) and abs(int(last)) < 2**31


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
async def test_the_api_server_is_asked_over_https_by_the_authority_of_the_cluster(tmp_path: Path) -> None:
    certificate = signed(tmp_path)
    server = ApiServer()
    with serving(server, certificate) as url:
        await KubernetesActuator(access(url, tmp_path, ca=certificate[0])).add("decode")
        assert server.replicas == 4
        with pytest.raises(ActuatorFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await KubernetesActuator(access(url, tmp_path)).add("decode")


def signed(directory: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    certificate = (directory / "ca.crt", directory / "ca.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=cluster", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
            *("-keyout", str(certificate[1]), "-out", str(certificate[0])),
        ],
        check=True,
        capture_output=True,
    )
    return certificate


async def test_a_change_whose_answer_was_lost_is_not_made_twice(cluster) -> None:
    server, actuator = cluster
    server.lose = 1
    with pytest.raises(ActuatorFailed):
        await actuator.add("prefill")
    assert server.replicas == 4
    await actuator.add("prefill")
    assert server.replicas == 4
    await actuator.add("prefill")
    assert server.replicas == 5


async def test_who_changes_the_scale_meanwhile_is_not_overwritten(cluster) -> None:
    server, actuator = cluster

    def meddle() -> None:
        server.replicas, server.version, server.meddle = 9, server.version + 1, lambda: None

    server.meddle = meddle
    with pytest.raises(ActuatorFailed, match="409"):
        await actuator.add("prefill")
    assert server.replicas == 9
    await actuator.add("prefill")
    assert server.replicas == 10


async def test_what_cannot_be_done_in_a_cluster_says_why(cluster, tmp_path: Path) -> None:
    server, actuator = cluster
    with pytest.raises(ActuatorFailed, match=r"0 pods of prod have the address 10\.0\.0\.9"):
        await actuator.remove(WorkerPlace("member-9", "10.0.0.9:7500"))
    assert server.replicas == 3
    server.token = "a newer one"
    with pytest.raises(ActuatorFailed, match="401"):
        await actuator.add("prefill")
    (tmp_path / "token").write_text("a newer one")
    await actuator.add("prefill")
    assert server.replicas == 4
    (tmp_path / "token").unlink()
    with pytest.raises(ActuatorFailed, match="token"):
        await actuator.add("prefill")


async def test_there_are_never_more_replicas_than_workers_may_be(tmp_path: Path) -> None:
    """As would be, if none of them ever joined."""
    server = ApiServer()
    with serving(server) as url:
        actuator = KubernetesActuator(access(url, tmp_path, most=4))
        await actuator.add("prefill")
        with pytest.raises(ActuatorFailed, match="workers has 4 replicas already"):
            await actuator.add("prefill")
    assert server.replicas == 4


async def test_another_workload_is_named_by_its_group(tmp_path: Path) -> None:
    found = access("http://x/", tmp_path, resource="leaderworkerset.x-k8s.io/v1/leaderworkersets", name="w")
    assert found.scale_url == "http://x/apis/leaderworkerset.x-k8s.io/v1/namespaces/prod/leaderworkersets/w/scale"


class Wishes:
    """Hears wishes, and fulfils each once."""

    def __init__(self, *statuses: int) -> None:
        self.heard: list[Heard] = []
        self.statuses = list(statuses)

    def __call__(self, heard: Heard) -> tuple[int, Any] | None:
        self.heard.append(heard)
        status = self.statuses.pop(0) if self.statuses else 200
        return (status, {}) if status else None

    @property
    def ids(self) -> list[str]:
        return [heard.headers["webhook-id"] for heard in self.heard]


async def test_a_wish_is_signed_and_says_what_is_wanted() -> None:
    wishes = Wishes()
    with serving(wishes) as url:
        actuator = WebhookActuator(WebhookTarget(url=f"{url}/scale", key=KEY))
        await actuator.add("decode")
        await actuator.remove(WORKER)
    add, remove = wishes.heard
    assert json.loads(add.body) == {"id": wishes.ids[0], "wish": "add", "role": "decode"}
    assert json.loads(remove.body) == {
        "id": wishes.ids[1],
        "wish": "remove",
        "worker": "member-2",
        "address": "10.0.0.2:7500",
    }
    for heard in wishes.heard:
        signed = b".".join(
            [heard.headers["webhook-id"].encode(), heard.headers["webhook-timestamp"].encode(), heard.body]
        )
        right = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        assert heard.headers["webhook-signature"] == f"v1,{right}"


@pytest.mark.parametrize("failing", [[503], [0], [429, 500]], ids=["refused", "cut", "twice"])
async def test_a_wish_is_repeated_under_the_same_id(failing: list[int]) -> None:
    wishes = Wishes(*failing)
    with serving(wishes) as url:
        await WebhookActuator(WebhookTarget(url=url, key=KEY), pause_s=0.001).add("prefill")
    assert len(wishes.ids) == len(failing) + 1
    assert len(set(wishes.ids)) == 1


async def test_a_wish_that_failed_is_the_same_wish_the_next_time() -> None:
    wishes = Wishes(500, 500, 500, 500)
    with serving(wishes) as url:
        actuator = WebhookActuator(WebhookTarget(url=url, key=KEY), pause_s=0.001)
        with pytest.raises(ActuatorFailed, match="500"):
            await actuator.add("prefill")
        await actuator.add("prefill")
        assert len(set(wishes.ids)) == 1
        await actuator.add("prefill")
        assert len(set(wishes.ids)) == 2


async def test_a_worker_that_is_taken_away_again_is_another_wish() -> None:
    """It had got work again meanwhile, and the service counts the first wish as fulfilled."""
    wishes = Wishes(403)
    with serving(wishes) as url:
        actuator = WebhookActuator(WebhookTarget(url=url, key=KEY), pause_s=0.001)
        with pytest.raises(ActuatorFailed, match="403"):
            await actuator.remove(WORKER)
        await actuator.remove(WORKER)
        assert len(set(wishes.ids)) == 1
        await actuator.remove(WORKER)
        assert len(set(wishes.ids)) == 2


async def test_a_wish_that_is_wrong_is_not_repeated() -> None:
    wishes = Wishes(403)
    with serving(wishes) as url:
        with pytest.raises(ActuatorFailed, match="403"):
            await WebhookActuator(WebhookTarget(url=url, key=KEY)).add("prefill")
    assert len(wishes.heard) == 1

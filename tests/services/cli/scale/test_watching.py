"""What is read of a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.scale.config import ScaleConfig
from penstock.cli.scale.watching import MeshWatch
from penstock.errors import Refused
from penstock.runtime.addresses import HostPort
from penstock.runtime.config import ConfigError
from penstock.v1 import router_pb2

ROUTER = HostPort("127.0.0.1:1")


def member(id: str, role: str, model: str = "m") -> router_pb2.JoinedMember:
    return router_pb2.JoinedMember(member_id=id, role=router_pb2.Role.Value(f"ROLE_{role}"), model_name=model)


def test_workers_of_both_roles_and_of_other_models_are_left_alone() -> None:
    watch = MeshWatch(ScaleConfig(router=(ROUTER,), model_name="m"))
    found = router_pb2.MembersResponse(
        members=[member("p", "PREFILL"), member("d", "DECODE"), member("b", "BOTH"), member("x", "DECODE", "other")]
    )
    assert [one.member_id for one in watch._of_model(found)] == ["p", "d"]
    assert watch.left_alone == 1


def test_of_several_models_one_has_to_be_named() -> None:
    found = router_pb2.MembersResponse(members=[member("a", "DECODE", "one"), member("b", "DECODE", "two")])
    with pytest.raises(Refused, match="name one of one, two with --model-name"):
        MeshWatch(ScaleConfig(router=(ROUTER,)))._of_model(found)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"router": ()}, "must be the address of a router"),
        ({"goodput": 1.0}, "goodput = 1.0: must be 0.5 to 0.999"),
        ({"min_decode": 5}, "max_decode = 4: must be 5 to 1024"),
        ({"every_s": 0.0}, "must be more than 0"),
        ({"actuator": "kubernetes", "kubernetes": "deployments/x"}, "must be NAMESPACE/deployments/NAME"),
        ({"actuator": "webhook", "webhook": "fleet"}, "must be an address such as https://"),
        ({"actuator": "webhook", "webhook": "https://fleet/"}, "make one with `openssl rand"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ScaleConfig(**{"router": (ROUTER,)} | settings)
    assert says in str(caught.value)

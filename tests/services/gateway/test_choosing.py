"""Which router a gateway plans with."""

from __future__ import annotations

from penstock.gateway.mesh.choosing import RouterChoice


def test_the_first_that_answers_is_kept_until_it_fails() -> None:
    choice: RouterChoice[str] = RouterChoice(["a", "b", "c"])
    assert (choice.view, choice.order()) == (None, ["a", "b", "c"])
    choice.heard("b", "from b", useful=True)
    assert (choice.view, choice.order()) == ("from b", ["b", "a", "c"])
    choice.heard("a", "from a", useful=True)
    assert choice.view == "from b", "a change is not for nothing"
    choice.lost("b")
    assert (choice.view, choice.order()) == ("from a", ["a", "b", "c"])
    choice.lost("a")
    assert choice.view is None


def test_one_that_knows_workers_comes_before_one_that_does_not() -> None:
    choice: RouterChoice[str] = RouterChoice(["a", "b"])
    choice.heard("a", "nobody is here", useful=False)
    assert choice.chosen == "a"
    choice.heard("b", "workers", useful=True)
    assert choice.chosen == "b"
    choice.heard("b", "nobody is here", useful=False)
    assert choice.chosen == "b", "neither is better"


def test_one_that_did_not_plan_waits_until_it_says_something() -> None:
    choice: RouterChoice[str] = RouterChoice(["a", "b"])
    choice.heard("a", "1", useful=True)
    choice.heard("b", "1", useful=True)
    choice.failed("a")
    assert choice.order() == ["b", "a"]
    choice.failed("b")
    assert choice.chosen == "b", "both failed: neither is better"
    choice.heard("a", "2", useful=True)
    assert choice.chosen == "a"

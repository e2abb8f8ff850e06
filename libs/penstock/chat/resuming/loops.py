"""Makes a template's loops pass by `WatchedRun.walk`, which sees each round begin.

    {% for message in messages %} ... loop.index0 ... {% endfor %}

becomes

    {% for message, LOOP in WALK(number, messages, {"name": name, ...}) %} ... LOOP.index0 ... {% endfor %}

with all names that the template sets outside of loops and macros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes

WALK = "_penstock_walk"
_LOOP = "_penstock_loop"
_CHANCE = "random"
"""A filter that gives something else every time."""


def watching(template: nodes.Template) -> nodes.Template | None:
    """The template, changed in place; None: nothing in it can be watched."""
    outer = list(_outer(template.body))
    loops = [node for node in outer if isinstance(node, nodes.For) and _plain(node)]
    if not loops or any(used.name == _CHANCE for used in template.find_all(nodes.Filter)):
        return None
    names = sorted({name for node in outer for name in _set_by(node)})
    for number, loop in enumerate(loops):
        _pass_by(loop, number, names)
    return template


def _outer(body: list[nodes.Node]) -> Iterator[nodes.Node]:
    """The statements whose variables are the template's own."""
    for node in body:
        yield node
        if isinstance(node, nodes.If):
            for branch in (node.body, node.elif_, node.else_):
                yield from _outer(branch)  # type: ignore[arg-type]


def _plain(loop: nodes.For) -> bool:
    return isinstance(loop.target, nodes.Name) and not (loop.test or loop.recursive or loop.else_)


def _set_by(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Macro):
        yield node.name
    elif isinstance(node, nodes.Assign | nodes.AssignBlock):
        inner = node.target.find_all(nodes.Name)
        yield from (name.name for name in (node.target, *inner) if isinstance(name, nodes.Name))


def _pass_by(loop: nodes.For, number: int, names: list[str]) -> None:
    for node in loop.body:
        _rename(node)
    pairs = [nodes.Pair(nodes.Const(name), nodes.Name(name, "load")) for name in names]
    given: list[Any] = [nodes.Const(number), loop.iter, nodes.Dict(pairs)]
    loop.iter = nodes.Call(nodes.Name(WALK, "load"), given, [], None, None)
    targets: list[Any] = [loop.target, nodes.Name(_LOOP, "store")]
    loop.target = nodes.Tuple(targets, "store")
    loop.set_lineno(loop.lineno)
    if loop.environment is not None:
        loop.set_environment(loop.environment)


def _rename(node: nodes.Node) -> None:
    """Gives `loop` its new name, but not where it is that of another loop."""
    if isinstance(node, nodes.Name) and node.name == "loop":
        node.name = _LOOP
    inner = node.iter_child_nodes(exclude=("body",)) if isinstance(node, nodes.For) else node.iter_child_nodes()
    for child in inner:
        _rename(child)

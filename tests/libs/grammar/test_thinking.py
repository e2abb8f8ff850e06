"""Reasoning and a constraint in one grammar, whether the markers are tokens or text."""

from __future__ import annotations

import pytest
from tests.libs.grammar.walking import accepts

from penstock.grammar.recipe import Part, build
from penstock.grammar.thinking import after_thinking

PART = Part("schema", '{"type": "integer"}', "here")


@pytest.mark.parametrize(
    ("markers", "tokens"),
    [
        (("<think>", "</think>"), {}),
        (("<tool_call>", "</tool_call>"), {"<tool_call>": 3, "</tool_call>": 4}),
        (("[THINK]", "</tool_call>"), {"</tool_call>": 4}),
        (("<tool_call>thought\n", "</tool_call>"), {"<tool_call>": 3, "</tool_call>": 4, "": 5}),
    ],
)
def test_the_constraint_holds_behind_the_reasoning(markers, tokens) -> None:
    begin, end = markers
    maybe = build(after_thinking(PART, markers, tokens, opened=False), ())
    assert accepts(maybe, "12")
    assert accepts(maybe, f'{begin}Well: {{"a" is\n\n "b"}}{end}\n\n-3')
    assert accepts(maybe, f"{begin}{end}7")
    for wrong in (f"{begin}12", f"{begin}a{end}b", f"12{end}", f"{begin}a{end}b{end}12", f"{begin}a{end}\n\n\n12"):
        assert not accepts(maybe, wrong)
    opened = build(after_thinking(PART, markers, tokens, opened=True), ())
    assert accepts(opened, f"Well, 7.{end}\n\n7")
    assert not accepts(opened, "7")

"""Constraints of every kind become grammars of exactly the texts that they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.libs.grammar.walking import accepts

from penstock.errors import InvalidRequest
from penstock.grammar import text
from penstock.grammar.recipe import Kind, Part, Recipe, answer, build
from penstock.grammar.schema import read_schema

CONTROL = ("<|im_end|>", "<tool_call>")
ARITHMETIC = """# llama.cpp's way of writing it
root ::= (expression "\\n")+
expression ::= term ([-+*/] term)*   # left to right
term ::= number
       | "(" expression ")"
number ::= [0-9]{1,3}
"""


def grammar(kind: Kind, given: str) -> str:
    return build(answer(Part(kind, given, "here")), CONTROL)


@pytest.mark.parametrize(
    ("kind", "given", "right", "wrong"),
    [
        ("object", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("schema", '{"type": "integer"}', "-12", "1.5"),
        ("regex", r"\d{3}/[a-z/]+", "123/a/b", "12/a"),
        ("regex", "^(yes|no)$", "yes", "yes!"),
        ("regex", "a\nb", "a\nb", "a b"),
        ("choice", '["red", "redder", "\\"q\\\\"]', "redder", "redd"),
        ("choice", '["red", "redder", "\\"q\\\\"]', '"q\\', "q"),
        ("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]+/', "a12", "a"),
        ("grammar", 'start: "x" %json {"type": "array"} // whatever', "x[1, 2]", "x[1,2]"),
        ("grammar", "start: word\nword[lazy]: /[a-z]+!/", "hey!", "hey"),
        ("grammar", ARITHMETIC, "1+(2*3)\n7\n", "1+\n"),
        ("grammar", 'root ::= "ab" "c" | [a-z] [a-z] "d"', "abd", "xyc"),
        ("grammar", 'root ::= thing "b"\nthing ::= "a" thing | "a" "b" thing | ""', "ababb", "aba"),
        ("grammar", 'root ::= [^\\n"\\]]+ "\\x41\\u00e9\\U0001F600" .', "x-Aé😀\n", "xA"),
        ("grammar", 'root ::= ("a" | "b"){2} "c"{1,} "ab"? "d"*', "abccab", "ac"),
    ],
)
def test_texts(kind: Kind, given: str, right: str, wrong: str) -> None:
    made = grammar(kind, given)
    assert accepts(made, right)
    assert not accepts(made, wrong)


@pytest.mark.parametrize(
    ("kind", "given", "where", "says"),
    [
        ("schema", "{", "here", "is not valid JSON"),
        ("schema", '{"not": {}}', "here.not", "is not supported"),
        ("schema", "[" * 100_000, "here", "is not valid JSON"),
        ("choice", "[]", "here", "must have 1 to 1000"),
        ("choice", '["a", ""]', "here", "must not be empty"),
        ("choice", '["a", 3]', "here", "must be a list of strings"),
        ("choice", '["a", "<tool_call>"]', "here[1]", "control token"),
        ("choice", json.dumps(["x" * 60_001] * 2), "here", "120000 characters"),
        ("regex", "", "here", "must not be empty"),
        ("regex", "a" * 2_049, "here", "2048"),
        ("regex", r"<\|im_end\|>", "here", "control token"),
        ("grammar", " " * (1 << 21), "here", "must have at most"),
        ("grammar", 'start: "a"\n  <|im_end|>', "here", "line 2: special tokens like '<|im_end|>'"),
        ("grammar", "start: <[3]>", "here", "special tokens like '<[3]>'"),
        ("grammar", 'start: "<tool_call>"', "here", "line 1: must not contain '<tool_call>'"),
        ("grammar", "start: @other", "here", "other grammars"),
        ("grammar", 'start: x\nx[temperature=0.3]: "a"', "here", "line 2: the option temperature"),
        ("grammar", 'start: x\nx[max_tokens=3]: "a"', "here", "the option max_tokens"),
        ("grammar", 'start: x\nx[capture="a", stop="b"]: /a/', "here", "the option stop"),
        ("grammar", 'start: "a"\n%llguidance {"no_forcing": true}', "here", "%llguidance"),
        ("grammar", 'start: %json {"not": {}}', "here.%json.not", "is not supported"),
        ("grammar", "start: %json {", "here", "not followed by a JSON object"),
        ("grammar", 'rot ::= "a"', "here", "no rule named root"),
        ("grammar", "root ::= other", "here", "there is no rule 'other'"),
        ("grammar", 'root ::= "a\n', "here", 'line 1: " is missing'),
        ("grammar", 'root ::= "a" )', "here", "line 1: a rule must end"),
        ("grammar", 'root ::= ("a"', "here", ") was expected"),
        ("grammar", "root ::= [z-a]", "here", "a range must go"),
        ("grammar", 'root ::= "a"{5,2}', "here", "a repetition"),
        ("grammar", 'root ::= "a"{0,1000000}', "here", "a repetition"),
        ("grammar", 'root ::= "a"\nroot ::= "b"', "here", "line 2: the rule 'root' is there twice"),
        ("grammar", 'root ::= "<tool_" "x" "<tool_call>"', "here", "control token"),
        ("grammar", "root ::= " + "(" * 200 + '"a"' + ")" * 200, "here", "nested more than"),
        ("grammar", 'root ::= "\\UFFFFFFFF"', "here", "there is no such character"),
    ],
)
def test_what_is_wrong_is_named(kind: Kind, given: str, where: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(kind, given)
    assert caught.value.field == where and says in caught.value.message


def test_parts_in_a_frame() -> None:
    city = Part("schema", '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}', "one")
    recipe = Recipe((("one", city), ("two", Part("choice", '["stop"]', "two"))), 'start: "go " @one | @two\n')
    made = build(recipe, CONTROL)
    assert accepts(made, 'go {"city": "Oslo"}')
    assert accepts(made, "stop")
    assert not accepts(made, '{"city": "Oslo"}')


def test_pieces_of_rules() -> None:
    schema = read_schema({"type": "object", "properties": {"a": {"const": 'q"'}}, "required": ["a"]}, "s")
    pieces = [text.literal('say "\n'), text.inline(schema), text.regex("[/]+"), text.token(4)]
    made = f"start: {' '.join(pieces)}\n"
    assert accepts(made, 'say "\n{"a": "q\\""}//</tool_call>')


def test_a_digest_names_a_recipe() -> None:
    part = Part("regex", "a", "here")
    others = [Part("regex", "b", "here"), Part("choice", "a", "here"), Part("regex", "a", "there")]
    digests = {answer(part).digest(), *(answer(other).digest() for other in others)}
    digests |= {Recipe((("answer", part),), "start: @answer").digest(), Recipe((("other", part),)).digest()}
    assert len(digests) == 6 and answer(Part("regex", "a", "here")).digest() in digests


def test_files_of_llama_cpp() -> None:
    """Grammars as llama.cpp ships them: its own JSON grammar."""
    made = grammar("grammar", (Path(__file__).parent / "json.gbnf").read_text())
    assert accepts(made, '{"a": [1, -2.5e3, "x\\n", true, null]}')
    assert not accepts(made, '{"a": [1,]}')

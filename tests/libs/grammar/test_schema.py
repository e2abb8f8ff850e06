"""Schemas are followed or refused by name and place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.libs.grammar.walking import MINI, accepts, allows, grammar_of

from penstock.errors import InvalidRequest
from penstock.grammar import schema as rules
from penstock.grammar.helper import Trial
from penstock.grammar.recipe import Part, answer
from penstock.grammar.schema import read_schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def refusal(schema: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_schema(schema, "s", ("<|im_end|>", "<tool_call>"))
    return caught.value


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (PERSON, {"name": "Ann", "age": 3}, {"name": "Ann"}),
        (PERSON, {"name": "", "age": -30}, {"name": "Ann", "age": 3, "more": 1}),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 2, 3], [1]),
        ({"enum": ["a", 1, None, {"x": [True]}]}, {"x": [True]}, {"x": [False]}),
        ({"const": "é\n"}, "é\n", "é"),
        ({"type": "string", "pattern": "^[0-9]{3}$"}, "123", "1234"),
        ({"type": "string", "format": "date"}, "2024-02-29", "2024-13-01"),
        ({"type": "string", "format": "date"}, "2000-02-29", "2023-02-29"),
        ({"type": "string", "format": "date", "allOf": [{"pattern": "^1"}]}, "1996-02-29", "1900-02-29"),
        ({"format": "date-time"}, "1996-02-29T23:59:59.5Z", "1997-02-29T00:00:00Z"),
        ({"format": "date-time"}, 3, "1996-02-29T23:59:60Z"),
        ({"type": ["string", "null"], "format": "time"}, "12:00:00+02:00", "12:59:60Z"),
        ({"type": ["integer", "null"]}, None, "x"),
        (
            {"$defs": {"n": {"enum": ["a"]}}, "type": "object", "propertyNames": {"$ref": "#/$defs/n"}},
            {"a": 1},
            {"b": 1},
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, {"x": 1, "xy": None}, {"y": 1}),
        (
            {"type": "object", "propertyNames": {"enum": ["a.b", "c"]}, "additionalProperties": {"type": "integer"}},
            {"c": 1, "a.b": 2},
            {"axb": 1},
        ),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 7.0}, 6, 7),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 2]),
        ({"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}, 12, 9007199254740992),
        ({"type": "array", "uniqueItems": False}, [1, 1], 1),
        ({"definitions": {"n": {"type": "null"}}, "$ref": "#/definitions/n"}, None, 1),
        ({"components": {"a/b": [{"type": "null"}]}, "$ref": "#/components/a~1b/0"}, None, 1),
        ({"$defs": {"n": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, None, 1),
        ({"type": "object", "propertyNames": {"type": "string"}, "x-order": 3, "colour": "red"}, {"a": 1}, []),
        ({"type": "string", "format": "password", "description": "not a keyword", "default": 3}, "x", 3),
        ({"type": "integer", "format": "int32"}, 3, "x"),
        (True, [None], ...),
        ({}, {"a": [1.5]}, ...),
    ],
)
def test_values_are_those_of_the_schema(schema: Any, right: Any, wrong: Any) -> None:
    assert allows(schema, right)
    assert wrong is ... or not allows(schema, wrong)


def test_a_tree_refers_to_itself() -> None:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    assert allows(tree, {"children": [{"children": []}, {"children": [{"children": []}]}]})
    assert not allows(tree, {"children": [{}]})
    assert allows({"type": "object", "additionalProperties": {"$ref": "#"}}, {"a": {"b": {}}})


def test_a_union_with_a_tag_through_references() -> None:
    def kind(tag: str, more: str) -> dict[str, Any]:
        properties = {"kind": {"const": tag, "type": "string"}, more: {"type": "integer"}}
        return {"type": "object", "properties": properties, "required": ["kind", more], "additionalProperties": False}

    options = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
    definitions = {"Cat": kind("cat", "lives"), "Dog": kind("dog", "bones")}
    union = {"$defs": definitions, "oneOf": options, "discriminator": {"propertyName": "kind"}}
    assert allows(union, {"kind": "dog", "bones": 3})
    assert not allows(union, {"kind": "dog", "lives": 3})


def test_a_discriminator_demands_its_tag() -> None:
    options = [{"type": "object", "properties": {"kind": {"const": kind, "default": kind}}} for kind in "ab"]
    union = {"oneOf": options, "discriminator": {"propertyName": "kind"}}
    assert allows(union, {"kind": "b"}) and not allows(union, {}) and not allows(union, {"kind": "c"})


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ({"type": "string"}, {"type": "integer"}, True),
        ({"type": "number"}, {"type": "integer"}, False),
        ({"type": "number"}, {"const": 3}, False),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": 1}, {"const": True}, True),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}, False),
        ({"properties": {"t": {"const": 1}}}, {"properties": {"t": {"const": 2}}, "required": ["t"]}, False),
    ],
)
def test_options_that_may_match_together_stay(one: Any, other: Any, apart: bool) -> None:
    assert ("anyOf" in read_schema({"oneOf": [one, other]}, "s")) is apart


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\s$", "\ufeff \u3000\n", "\x85x\u200b"),
        (r"^\S$", "\x85x\u200b", "\ufeff \u3000\n"),
        (r"^[\s,]$", "\ufeff,", "\x85x"),
        (r"^[^\s,]$", "\x85x", "\ufeff,"),
        (r"^[\S\n]$", "\x85x\n", "\ufeff "),
        (r"^[-\s]$", "\ufeff-", "\x85x"),
        (r"^[^-\s]$", "\x85x", "\ufeff-"),
        (r"^[a-c-\s]$", "b- ", "\x85x"),
        (r"^\\s$", [r"\s"], " \ufeff"),
    ],
)
def test_white_space_of_patterns_is_that_of_ecmascript(pattern: str, right: Any, wrong: str) -> None:
    grammar = grammar_of({"type": "string", "pattern": pattern})
    assert [text for text in right if not accepts(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in wrong if accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


def test_white_space_of_the_patterns_of_names_is_that_of_ecmascript() -> None:
    schema = {"type": "object", "patternProperties": {r"^\S$": {"type": "null"}}, "additionalProperties": False}
    assert allows(schema, {"x": None}) and not allows(schema, {"\ufeff": None})


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"pattern": r"[!-\s]"}, "s.pattern"),
        ({"patternProperties": {r"^\s[\S]": {"pattern": "(?=x)"}}}, r's.patternProperties["^\\s[\\S]"].pattern'),
    ],
)
def test_white_space_is_named_as_it_was_sent(schema: Any, field: str) -> None:
    """In the first it ends a range."""
    assert Trial(MINI.read_text(), ()).verdict(answer(Part("schema", json.dumps(schema), "s"))).field == field


def test_white_space_is_what_templates_print_and_nothing_else() -> None:
    grammar = grammar_of({"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    assert accepts(grammar, '{"a": [1, 2]}')
    for other in ('{"a":[1, 2]}', '{ "a": [1, 2]}', '{"a": [1,2]}', '{"a":  [1]}', '{"a": [1]}\n', ' {"a": [1]}'):
        assert not accepts(grammar, other)


@pytest.mark.parametrize(
    ("schema", "where", "says"),
    [
        ({"properties": {"a": {"not": {}}}}, "s.properties.a.not", "is not supported"),
        ({"items": {"anyOf": [{}, {"if": {}}]}}, "s.items.anyOf[1].if", "is not supported"),
        ({"properties": {"a b": {"uniqueItems": True}}}, 's.properties["a b"].uniqueItems', "is not supported"),
        ({"$defs": {"x": {"contains": {}}}, "$ref": "#/$defs/x"}, "s.$defs.x.contains", "is not supported"),
        ({"dependentRequired": {"a": ["b"]}}, "s.dependentRequired", "is not supported"),
        ({"items": {"$id": "/other"}}, "s.items.$id", "is not supported below the root"),
        ({"properties": {"a": {}}, "propertyNames": {"pattern": "a"}}, "s.propertyNames", "is not supported"),
        ({"nullable": True}, "s.nullable", "is not supported"),
        ({"x-guidance": {"lenient": True}}, 's["x-guidance"]', "is not supported"),
        ({"type": "string", "maxLenght": 3}, "s.maxLenght", "did you mean maxLength"),
        ({"type": "string", "format": "byte"}, "s.format", "'byte' is not supported; there are date-time"),
        ({"type": "strin"}, "s.type", "must be one of null"),
        ({"type": []}, "s.type", "must be one of null"),
        ({"enum": []}, "s.enum", "at least one value"),
        ({"anyOf": []}, "s.anyOf", "at least one schema"),
        ({"anyOf": {}}, "s.anyOf", "at least one schema"),
        ({"properties": []}, "s.properties", "must be an object of schemas"),
        ({"properties": {"a": 3}}, "s.properties.a", "must be a JSON Schema"),
        ({"required": True}, "s.required", "must be a list of strings"),
        ({"minLength": -1}, "s.minLength", "whole number"),
        ({"minItems": 1.5}, "s.minItems", "whole number"),
        ({"minItems": True}, "s.minItems", "whole number"),
        ({"multipleOf": 0}, "s.multipleOf", "more than 0"),
        ({"minimum": 10**30}, "s.minimum", "must be a number between"),
        ({"pattern": 3}, "s.pattern", "must be a string"),
        ({"$ref": "https://example.com/a.json"}, "s.$ref", "only references to # are followed"),
        ({"$ref": "#/$defs/none"}, "s.$ref", "there is no '#/$defs/none'"),
        ({"$ref": "#none"}, "s.$ref", "there is no '#none'"),
        ({"const": "<|im_end|>"}, "s.const", "control token"),
        ({"enum": [{"a": ["x<tool_call>"]}]}, "s.enum", "control token"),
        ({"properties": {"<tool_call>": {}}}, 's.properties["<tool_call>"]', "control token"),
        ({"required": ["<tool_call>"]}, "s.required", "control token"),
        ({"pattern": r"^<\|im_end\|>$"}, "s.pattern", "control token"),
        (3, "s", "must be a JSON Schema"),
        (False, "s", "no value can match"),
        ({"$ref": "#"}, "s", "no finite value"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "s", "no finite value"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "s", "no finite value"),
        ({"anyOf": [{"$ref": "#"}, False]}, "s", "no finite value"),
    ],
)
def test_what_can_not_be_followed_is_named(schema: Any, where: str, says: str) -> None:
    error = refusal(schema)
    assert (error.http_status, error.field) == (400, where)
    assert error.message.startswith(f"{where}: ") and says in error.message


def nested(deep: int, kind: str = "object") -> Any:
    schema: Any = {"type": "string"}
    for _ in range(deep):
        schema = {"properties": {"a": schema}} if kind == "object" else {"items": schema}
    return schema


def wide(count: int, length: int = 4) -> Any:
    return {"properties": {f"{number:0{length}}": {} for number in range(count)}}


@pytest.mark.parametrize(
    ("fine", "over", "where"),
    [
        (nested(rules.MAX_OBJECTS_DEEP), nested(rules.MAX_OBJECTS_DEEP + 1), "s" + ".properties.a" * 10),
        (nested(rules.MAX_DEEP, "array"), nested(rules.MAX_DEEP + 1, "array"), "s" + ".items" * 65),
        (wide(rules.MAX_PROPERTIES), wide(rules.MAX_PROPERTIES + 1), "s.properties"),
        (wide(1_000, 120), wide(1_000, 121), "s.properties"),
        ({"enum": list(range(1_000))}, {"enum": list(range(1_001))}, "s.enum"),
        ({"enum": ["x" * 50] * 250}, {"enum": ["x" * 60] * 251}, "s.enum"),
        ({"const": "x" * 119_000}, {"const": "x" * 120_000}, "s.const"),
        ({"pattern": "a" * 2_048}, {"pattern": "a" * 2_049}, "s.pattern"),
        ({"anyOf": [{}] * 1_000}, {"anyOf": [{}] * 1_001}, "s.anyOf"),
        (
            {"patternProperties": {f"^{number}": {} for number in range(64)}},
            {"patternProperties": {f"^{number}": {} for number in range(65)}},
            "s.patternProperties",
        ),
    ],
)
def test_bounds(fine: Any, over: Any, where: str) -> None:
    read_schema(fine, "s")
    assert refusal(over).field == where


def test_bounds_hold_for_all_places_together() -> None:
    half = wide(rules.MAX_PROPERTIES // 2)
    assert refusal({"anyOf": [half, half, wide(1)]}).field == "s.anyOf[2].properties"
    assert (
        refusal({"$defs": {"half": half}, "anyOf": [{"$ref": "#/$defs/half"}, half, wide(1)]}).code
        == "schema_too_large"
    )


def test_a_definition_counts_once_however_often_it_is_used() -> None:
    read_schema({"$defs": {"half": wide(2_500)}, "anyOf": [{"$ref": "#/$defs/half"}] * 900}, "s")

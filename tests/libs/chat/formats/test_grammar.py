"""The grammars of calls: what the family writes is let through, and nothing else."""

from __future__ import annotations

import json
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer

from penstock.chat.formats.families import FAMILIES, FORMATS
from penstock.chat.formats.grammar import CallRules, call_recipe
from penstock.chat.messages import Tool
from penstock.errors import InvalidRequest
from penstock.grammar.matcher import GrammarLeft, Matcher
from penstock.grammar.recipe import Part, build
from penstock.grammar.tokenizer import GrammarTokenizer

from ..tiny import SPECIAL, tiny_tokenizer
from .reading import parse

WEATHER = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Rome"]},
            "days": {"$ref": "#/$defs/days"},
            "wind": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "$defs": {"days": {"type": "integer"}},
    },
)
PLAIN = Tool("f", "", {})
ARGUMENTS = {"city": "Oslo", "days": 3}
EACH = pytest.mark.parametrize("name", [family.name for family in FAMILIES])
BOTH = pytest.mark.parametrize("added", [True, False], ids=["tokens", "texts"])


@cache
def tokenizer(added: bool) -> tuple[Tokenizer, GrammarTokenizer]:
    """One in which the markers of all families are tokens, and one in which they are text."""
    made = tiny_tokenizer() if added else Tokenizer.from_str(tiny_tokenizer().to_str().replace("tool_call>", "xyzzy>"))
    if added:
        markers = sorted({marker.strip() for family in FAMILIES for marker in family.control})
        made.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    eos = [made.token_to_id(SPECIAL[2])]
    return made, GrammarTokenizer(made.to_str(), made.get_vocab_size(with_added_tokens=True), eos)


def passes(name: str, text: str, *, added: bool = True, loose: tuple[str, ...] = (), **options: object) -> bool:
    """Whether `text` may be a whole answer."""
    own, grammars = tokenizer(added)
    family = FORMATS[name]
    tools = [("tools[0]", WEATHER), ("tools[1]", PLAIN)]
    rules = CallRules(**{"tools": tools, **options})
    tokens = {token.content: id for id, token in own.get_added_tokens_decoder().items()}
    matcher = Matcher.of(grammars, build(call_recipe(family, rules, tokens, loose), ()))
    try:
        matcher.accept(own.encode(text, add_special_tokens=False).ids)
    except GrammarLeft:
        return False
    return matcher.accepting


def written(name: str, *calls: tuple[str, dict]) -> str:
    """Calls as a template would print them."""
    family = FORMATS[name].written
    texts = []
    for number, (function, arguments) in enumerate(calls):
        if FORMATS[name].values == "python":
            own = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        elif FORMATS[name].values == "gemma":
            own = gemma(arguments)
        else:
            own = json.dumps(arguments)
        index = f":{number}" if family.number else ""
        texts.append(f"{family.before}{function}{index}{family.behind}{own}{family.after}")
    return family.begin + (family.between or "").join(texts) + family.end


def gemma(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


@EACH
def test_what_is_asked_for_is_what_is_read(name):
    text = written(name, ("get_weather", ARGUMENTS), ("f", {}))
    parsed = parse(FORMATS[name], text)
    assert parsed.calls[0][0] == "get_weather" and json.loads(parsed.calls[0][1]) == ARGUMENTS
    if FORMATS[name].written.between is not None:
        assert [call[0] for call in parsed.calls] == ["get_weather", "f"]
        assert parsed.content == ""


@EACH
@BOTH
def test_auto(name, added):
    one = written(name, ("get_weather", ARGUMENTS))
    two = written(name, ("get_weather", ARGUMENTS), ("f", {}))
    several = FORMATS[name].written.between is not None
    assert passes(name, "Hello, you.\n", added=added)
    assert passes(name, "", added=added)
    assert passes(name, one, added=added)
    assert passes(name, two, added=added) == several
    assert not passes(name, two, added=added, parallel=False)
    assert not passes(name, one + "\nMore.", added=added)
    assert passes(name, "Let me see.\n" + one, added=added) or FORMATS[name].leads
    if not FORMATS[name].leads:
        assert passes(name, "Let me see.\n" + two, added=added)


@EACH
@BOTH
def test_required(name, added):
    one = written(name, ("get_weather", ARGUMENTS))
    assert passes(name, one, added=added, required=True)
    assert passes(name, written(name, ("f", {})), added=added, required=True)
    for text in ("", "Hello", "Hello\n" + one):
        assert not passes(name, text, added=added, required=True)


@EACH
@BOTH
@pytest.mark.parametrize(
    "call",
    [
        ("g", {}),
        ("get_weather", {}),
        ("get_weather", {"city": "Paris", "days": 3}),
        ("get_weather", {"city": "Oslo", "days": "3"}),
        ("get_weather", {"city": "Oslo", "days": 3, "wind": 1}),
        ("get_weather", {"city": "Oslo", "days": 3, "more": 1}),
    ],
)
def test_other_functions_and_arguments_cannot_be_written(name, added, call):
    assert not passes(name, written(name, call), added=added)
    assert passes(name, written(name, ("get_weather", {**ARGUMENTS, "wind": True})), added=added)


@EACH
def test_a_function_has_the_parameters_that_are_named(name):
    named = {"type": "object", "properties": {"days": {"type": "integer"}}}
    several = written(name, ("f", {"days": 3, "more": 1}))
    assert passes(name, written(name, ("f", {"days": 3})), tools=[("tools[0]", Tool("f", "", named))])
    assert not passes(name, several, tools=[("tools[0]", Tool("f", "", named))])
    if FORMATS[name].values == "json":
        others = {**named, "additionalProperties": {"type": "integer"}}
        assert passes(name, several, tools=[("tools[0]", Tool("f", "", others))])
    assert passes(name, several, tools=[("tools[0]", Tool("f", "", {"type": "object"}))])


@EACH
@BOTH
def test_a_schema_that_is_not_followed_leaves_any_object(name, added):
    odd = written(name, ("get_weather", {"town": "Oslo", "more": {"a": None}}))
    assert not passes(name, odd, added=added)
    assert passes(name, odd, added=added, loose=("tools[0]",))
    assert not passes(name, odd.replace("get_weather", "g"), added=added, loose=("tools[0]",))


@EACH
@BOTH
def test_reasoning_comes_first(name, added):
    one, markers = written(name, ("get_weather", ARGUMENTS)), FORMATS[name].reasoning
    thought = f"{markers.open}hm {'' if added else one[1:]}{markers.close}\n\n"
    for required in (True, False):
        assert passes(name, one, added=added, required=required, thinks=True)
        assert passes(name, thought + one, added=added, required=required, thinks=True)
        rest = thought.removeprefix(markers.open)
        assert passes(name, rest + one, added=added, required=required, thinks=True, thinking=True)
        assert not passes(name, one, added=added, required=required, thinks=True, thinking=True)


@EACH
def test_an_answer_without_calls_may_have_a_form_too(name):
    content = Part("schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}', "x")
    assert passes(name, '{"a": 1}', content=content)
    assert passes(name, written(name, ("get_weather", ARGUMENTS)), content=content)
    assert not passes(name, "Hello", content=content)


@EACH
def test_what_cannot_be_followed_is_named(name):
    tool = Tool("h", "", {"type": "object", "properties": {"a": {"not": {"type": "string"}}}})
    rules = CallRules(tools=[("tools[0].function.parameters", tool)])
    with pytest.raises(InvalidRequest) as error:
        build(call_recipe(FORMATS[name], rules, {}), ())
    assert error.value.field == "tools[0].function.parameters.properties.a.not"


NODE = {"type": "object", "properties": {letter: {"$ref": "#/$defs/N"} for letter in "abcdefgh"}}
TREE = {"type": "object", "properties": {"x": {"$ref": "#/$defs/N"}}, "$defs": {"N": NODE}}


def test_what_refers_to_itself_has_one_rule():
    """And is followed however deep it goes."""
    rules = CallRules(tools=[("tools[0]", Tool("tree", "", TREE))], required=True)
    family = FORMATS["gemma"]
    recipe = call_recipe(family, rules, {})
    assert len(recipe.frame) < 10_000
    own, grammars = tokenizer(False)

    def may_be(arguments: str) -> bool:
        matcher = Matcher.of(grammars, build(recipe, ()))
        try:
            matcher.accept(
                own.encode(f"<|tool_call>call:tree{{{arguments}}}<tool_call|>", add_special_tokens=False).ids
            )
        except GrammarLeft:
            return False
        return matcher.accepting

    deep = "x:" + "{a:" * 12 + "{}" + "}" * 12
    assert may_be(deep) and may_be("x:{b:{},h:{c:{}}}") and not may_be(deep.replace("{a:{}", "{z:{}"))


ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}, "required": ["next"]}
CHAIN = {**{f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(600)}, "d600": {}}


@pytest.mark.parametrize(
    ("shared", "first", "code"),
    [
        ({"N": ENDLESS}, "N", "invalid_schema"),
        ({"N": {"$ref": "#/$defs/N"}}, "N", "invalid_schema"),
        (CHAIN, "d0", "schema_too_complex"),
    ],
)
def test_definitions_that_have_no_end_or_are_too_many_are_refused(shared, first, code):
    schema = {"type": "object", "properties": {"n": {"$ref": f"#/$defs/{first}"}}, "$defs": shared}
    rules = CallRules(tools=[("tools[0]", Tool("h", "", schema))], required=True)
    with pytest.raises(InvalidRequest) as error:
        call_recipe(FORMATS["gemma"], rules, {})
    assert error.value.code == code and error.value.field.startswith("tools[0].$defs")


def test_names_that_are_required_many_times_are_looked_at_once():
    inner: dict = {"type": "object"}
    for _ in range(9):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"] * 50}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": inner}}
    call_recipe(FORMATS["gemma"], CallRules(tools=[("tools[0]", Tool("h", "", schema))]), {})  # 50^9 looks else


TYPES = {"type": "object", "properties": {"p": {"type": ["object", "object", "null"], "properties": {"q": {}}}}}


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"$defs": []}, ".$defs"),
        ({"properties": ["a"]}, ".properties"),
        ({"properties": {"a": {"$ref": ["x"]}}}, ".properties.a.$ref"),
        ({"properties": {"a": {"enum": 5}}}, ".properties.a.enum"),
        ({"properties": {"a": {"type": "object", "properties": [1]}}}, ".properties.a.properties"),
        ({"properties": {"first name": {}}}, ".properties"),
        ({"properties": {"a:b": {}}}, ".properties"),
    ],
)
def test_odd_schemas_of_bare_keys_are_refused_by_name(schema, where):
    rules = CallRules(tools=[("tools[0]", Tool("h", "", {"type": "object", **schema}))])
    with pytest.raises(InvalidRequest) as error:
        call_recipe(FORMATS["gemma"], rules, {})
    assert error.value.field == "tools[0]" + where
    call_recipe(FORMATS["gemma"], CallRules(tools=[("tools[0]", Tool("h", "", TYPES))]), {})


@pytest.mark.parametrize("name", ["$filter", "first name", "a=b", "x" * 64])
def test_keywords_that_would_be_read_as_others_are_refused(name):
    rules = CallRules(tools=[("tools[0]", Tool("h", "", {"type": "object", "properties": {name: {}}}))])
    with pytest.raises(InvalidRequest, match="can't be written") as error:
        call_recipe(FORMATS["llama-pythonic"], rules, {})
    assert error.value.field == "tools[0].properties"


def test_what_properties_share_is_not_written_for_each_without_end():
    shared = {"A": {"type": "string", "description": "d" * 50_000}}
    many = {f"p{number}": {"$ref": "#/$defs/A"} for number in range(100)}
    plain = {f"p{number}": {"type": "string"} for number in range(100)}
    for members, fits in ((many, False), (plain, True)):
        schema = {"type": "object", "properties": members, "$defs": shared}
        rules = CallRules(tools=[("tools[0]", Tool("h", "", schema))])
        if fits:
            call_recipe(FORMATS["llama-pythonic"], rules, {})
            continue
        with pytest.raises(InvalidRequest) as error:
            call_recipe(FORMATS["llama-pythonic"], rules, {})
        assert error.value.code == "schema_too_large"

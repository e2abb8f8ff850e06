"""Turns of held-out documents: what a client asks, what is right, and for which figures each counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from random import Random

import jsonschema
import pytest

from penstock.models import embedded
from penstock.models.judging import Tally, Written, judge, right_calls
from penstock.models.render import MARK_OPEN, render
from penstock.models.report import fractions, spread, table
from penstock.models.sessions import KINDS, make
from penstock.models.tokenizer import load
from penstock.models.turns import calls_in, documents, fitting, turns
from penstock.models.words import Side

TALKS = ("json", "facts", "chat")


@pytest.fixture(scope="module")
def tokenizer():
    return load(embedded("penstock-mini"))


def test_what_a_client_sends_is_what_stands_before_the_turn():
    """With the messages of a client that writes calls its own way, the chat template is the judge: see
    `test_chat_template`."""
    for doc in documents((*KINDS, *TALKS), 3, 1):
        for turn in turns(doc):
            assert not {key for message in turn.messages for key in message} & {"label", "retold", "schema"}
            assert MARK_OPEN not in json.dumps(turn.messages, ensure_ascii=False)
            if not any(message.get("retold") for message in doc.messages):
                assert doc.text[: turn.begin] == render(turn.messages, turn.tools).text + "<|im_start|>assistant\n"
            assert doc.text[turn.begin :].startswith(turn.expected + "<|im_end|>")


def test_right_answers_keep_to_the_schemas_that_a_mesh_gets():
    """Else the grammar would forbid them. Properties come in the schema's order, as the grammar has them."""
    seen = Counter()
    for doc in documents((*KINDS, "json"), 4, 1):
        for turn in turns(doc):
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in turn.tools}
            objects = [(schemas[name], arguments) for name, arguments in written_calls(turn.expected)]
            if turn.schema is not None:
                objects.append((turn.schema, json.loads(turn.expected)))
            for schema, value in objects:
                jsonschema.validate(value, {**schema, "additionalProperties": False})
                assert list(value) == [key for key in schema["properties"] if key in value]
                seen[turn.label] += 1
    assert seen["call"] > 50 and seen["json"] > 5


def written_calls(text):
    bodies = [body.partition("</tool_call>")[0] for body in text.split("<tool_call>")[1:]]
    return [(call["name"], call["arguments"]) for call in map(json.loads, bodies)]


def test_turns_behind_the_context_do_not_count(tokenizer):
    [doc] = documents(("huge",), 1, 1)
    whole = list(fitting(tokenizer, doc, 8192))
    _, before, own = whole[2]
    end = len(before) + len(own)
    cut = list(fitting(tokenizer, doc, end))
    assert len(whole) > 3 and cut == whole[:3] and list(fitting(tokenizer, doc, end - 1)) == whole[:2]
    for turn, before, own in cut:
        assert tokenizer.decode(list(before), skip_special_tokens=False) == doc.text[: turn.begin]
        assert tokenizer.decode(list(own), skip_special_tokens=False) == turn.expected + "<|im_end|>"


def test_what_is_right_counts_as_right(tokenizer):
    for doc in documents((*KINDS, *TALKS, "asking", "foreign"), 2, 1):
        for turn, *_ in fitting(tokenizer, doc, 4096):
            right, wrong = judge(turn, Written.freely(turn.expected)), judge(turn, Written("no", []))
            assert all(right.values()) and not any(wrong.values()) and right.keys() == wrong.keys()


def test_documents_with_rare_turns_count_for_their_figures_alone(tokenizer):
    names, cases = {}, Counter()
    for doc in documents(("huge", "asking", "foreign"), 10, 1):
        for turn, *_ in fitting(tokenizer, doc, 4096):
            found = judge(turn, Written.freely(turn.expected))
            names.setdefault(doc.kind, set()).update(found)
            cases.update(found.keys())
    assert names == {"huge": {"tool_exact_huge"}, "asking": {"asks_back"}, "foreign": {"declines"}}
    assert cases["asks_back"] >= 40 and cases["declines"] >= 40


def test_a_call_is_judged_by_its_name_and_all_arguments():
    turn = next(turn for doc in documents(("L2",), 60, 1) for turn in turns(doc) if len(turn.calls) == 2)
    first, second = turn.calls
    assert right_calls(turn, Written("", turn.calls)) == 2
    for calls, right in (([first], 1), ([first, ("other", second[1])], 1), ([second, first], 0), (None, 0)):
        found = judge(turn, Written("", calls))
        assert not found["tool_exact"] and not found["tool_exact_parallel"]
        assert right_calls(turn, Written("", calls)) == right
    assert judge(turn, Written("", [(name, "{}") for name, _ in turn.calls]))["tool_name"]
    assert right_calls(turn, Written("", [*turn.calls, first])) == 0, "one too many"


def test_json_is_valid_before_it_is_right():
    turn = next(turn for doc in documents(("json",), 1, 1) for turn in turns(doc))
    for text, valid in ((turn.expected[:-1], False), ("[]", False), ("{}", False), (json.dumps({"a": 1}), False)):
        assert judge(turn, Written(text, [])) == {"json_valid": valid, "json_exact": False}
    value = json.loads(turn.expected)
    changed = {key: f"{item}x" if isinstance(item, str) else item for key, item in value.items()}
    assert changed != value
    assert judge(turn, Written(json.dumps(changed), [])) == {"json_valid": True, "json_exact": False}


def test_calls_are_read_from_a_turn():
    text = '<tool_call>\n{"name": "a", "arguments": {"y": 1, "x": "b"}}\n</tool_call>'
    assert calls_in(f"{text}\n{text}") == [("a", '{"x": "b", "y": 1}')] * 2
    assert calls_in("<tool_call>\n{oops}\n</tool_call>") is None
    assert calls_in("Hello.") == []


def tally(**shares):
    made = Tally()
    for name, (right, total) in shares.items():
        made.right[name], made.total[name] = right, total
    return made


def test_the_spread_is_the_mean_of_the_kinds_less_the_worst():
    [found] = spread(tally(tool_exact_L1=(9, 10), tool_exact_L2=(60, 100), tool_exact=(69, 110)), ("L1", "L2", "long"))
    assert (found["id"], found["value"], found["against"]) == ("kind_spread", 0.15, "tool_exact_L2")
    assert (found["goal"], found["met"]) == (0.1, False)
    [near] = spread(tally(tool_exact_L1=(9, 10), tool_exact_L2=(8, 10)), ("L1", "L2"))
    assert near["met"]
    assert spread(tally(), ("L1",)) == []


def test_the_table_has_a_second_column_where_there_is_one():
    free, mesh = tally(tool_exact=(9, 10), chat_exact=(1, 2)), tally(tool_exact=(10, 10))
    figures = [*fractions(free), *fractions(mesh, constrained=True)]
    assert [figure["id"] for figure in figures] == ["chat_exact", "tool_exact", "tool_exact_constrained"]
    head, chat, tool = table({"figures": figures}).splitlines()
    assert head.split() == ["free", "constrained"] and chat.startswith("chat_exact")
    assert tool.split()[:2] == ["tool_exact", "0.9"] and "goal 0.9: met" in tool
    assert tool.endswith("goal 0.92: met") and head.index("constrained") <= tool.index("1.0 [") < len(tool)
    assert "constrained" not in table({"figures": fractions(free)})


def test_documents_are_those_of_their_kind_and_seed():
    [doc] = documents(("L2",), 1, 7)
    assert doc.text == make("L2", Random("evaluation:7:L2:0"), Side(True)).text and doc.kind == "L2"


def test_nothing_of_it_needs_torch():
    code = "import sys, penstock.models.served, penstock.models.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

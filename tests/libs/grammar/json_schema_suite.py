"""JSON-Schema-Test-Suite, draft 2020-12, which is not part of this repository: `make test-schemas` fetches and runs it.

A schema is followed, and then every value of it can be written and no other, or it is refused by name.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.libs.grammar.walking import MINI, accepts

from penstock.grammar.helper import Trial, Verdict
from penstock.grammar.recipe import Part, answer

SUITE = Path(os.environ["JSON_SCHEMA_TEST_SUITE"])
"""The source archive of the package jsonschema."""
FOLDER = "/json/tests/draft2020-12/"
FEWER_VALUES = (
    ("format.json", "annotation by default"),  # a format is a rule here
    ("const.json", "property order"),  # one order of properties is written
    ("allOf.json", "allOf"),
    ("allOf.json", "valid"),
    ("", "float"),  # a whole number is written without a fraction
    ("enum.json", ".0] is valid"),
    ("float-overflow.json", ""),
    ("email.json", "quoted string"),
    ("email.json", "IPv6-address-literal"),
    ("ipv6.json", "mixed format"),
    ("ipv6.json", "a long valid ipv6"),
    ("date-time.json", "leap second"),  # no leap second is written
    ("time.json", "leap second"),
    ("vocabulary.json", "no validation"),  # a vocabulary of one's own
)
"""Right values that can't be written, by file and by a part of their description."""


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    with tarfile.open(SUITE) as archive:
        for name in sorted(archive.getnames()):
            if FOLDER in name and name.endswith(".json") and (found := archive.extractfile(name)):
                yield from ((name.partition(FOLDER)[2], case) for case in json.load(found))


def known(file: str, description: str) -> bool:
    return any(file.endswith(ending) and part in description for ending, part in FEWER_VALUES)


@pytest.fixture(scope="module")
def verdicts() -> list[tuple[str, dict[str, Any], Verdict]]:
    trial = Trial(MINI.read_text(), ())
    return [
        (file, case, trial.verdict(answer(Part("schema", json.dumps(case["schema"]), "s")))) for file, case in cases()
    ]


def test_every_right_value_can_be_written_and_no_wrong_one(verdicts) -> None:
    missing, extra, right = [], [], 0
    for file, case, verdict in verdicts:
        for test in case["tests"] if verdict.grammar else ():
            written = accepts(verdict.grammar, json.dumps(test["data"], ensure_ascii=False))
            where = (file, test["description"])
            right += written == test["valid"]
            if test["valid"] and not written and not known(*where):
                missing.append((*where, case["schema"], test["data"]))
            if written and not test["valid"]:
                extra.append((*where, case["schema"], test["data"]))
    assert missing == [] and extra == []
    assert right > 950


def test_what_is_refused_is_named(verdicts) -> None:
    refused: Counter[str] = Counter()
    for file, case, verdict in verdicts:
        if verdict.grammar:
            continue
        assert verdict.field and verdict.field.startswith("s") and verdict.message.startswith(f"{verdict.field}: ")
        if any(said in verdict.message for said in ("no finite value", "no value", "no text")):
            assert not any(test["valid"] for test in case["tests"]), (file, case["schema"])
        refused[verdict.message.partition(": ")[0].rpartition(".")[2]] += 1
    print("\nrefused, by the last step of the place:", dict(refused.most_common()))
    assert sum(refused.values()) < 250

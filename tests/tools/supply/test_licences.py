"""What packages are installed from, and which licences they may come under."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from penstock.supply.licences import AllowedLicences, locked, refusals, said

ROOT = Path(__file__).parents[3]
ALLOWED = AllowedLicences(
    licences=frozenset({"MIT", "BSD-3-Clause"}), words={"MIT License": "MIT"}, packages={"odd": "GPL-2.0-only"}
)


def package(**fields: str | list[str]) -> Message:
    made = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            made[name.replace("_", "-")] = value
    return made


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"License_Expression": "MIT OR X", "License": "long text"}, "MIT OR X"),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "Topic :: X"], "License": "X"}, "MIT License"),
        ({"Classifier": ["License :: DFSG approved", "License :: OSI Approved"], "License": "X\nmore"}, "X"),
        ({"Classifier": ["License :: OSI Approved :: B", "License :: OSI Approved :: A"]}, "A OR B"),
        ({}, ""),
    ],
)
def test_what_a_package_says(fields: dict[str, str | list[str]], words: str) -> None:
    assert said(package(**fields)) == words


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("MIT", False),
        ("MIT License", False),
        ("MIT AND BSD-3-Clause", False),
        ("GPL-3.0-only OR MIT", False),
        ("GPL-3.0-only AND MIT", True),
        ("GPL-3.0-only", True),
        ("(MIT)", True),
        ("", True),
    ],
)
def test_what_is_refused(words: str, refused: bool) -> None:
    assert ALLOWED.refused("some", words) is refused


def test_a_package_may_come_under_what_was_looked_at_and_nothing_else() -> None:
    assert not ALLOWED.refused("odd", "GPL-2.0-only") and ALLOWED.refused("odd", "GPL-3.0-only")


def test_an_unknown_licence_is_refused_by_name() -> None:
    nothing = AllowedLicences(licences=frozenset(), words={}, packages={})
    assert refusals(["grpcio", "there-is-no-such-package"], nothing) == ["grpcio: Apache-2.0"]


def test_what_is_locked_comes_under_what_is_allowed() -> None:
    command = [sys.executable, "-m", "penstock.supply.licences"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_locked_package_but_torch_has_hashes() -> None:
    text = (ROOT / "locked.txt").read_text()
    entries = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    names = {re.sub(r"[-_.]+", "-", entry.partition("==")[0]).lower() for entry in entries}
    constraints = (ROOT / "constraints.txt").read_text()
    assert names == {re.sub(r"[-_.]+", "-", name).lower() for name in locked(constraints)} - {"torch"}
    pins = {line.lower().replace("_", "-") for line in constraints.splitlines()}
    for entry in entries:
        pin, *hashes = entry.replace("\\\n", " ").split()
        assert pin.lower() in pins
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)


def lines_of(verb: str) -> list[str]:
    """What `make` would run where nothing is installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--always-make", "-n", verb]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_setup_takes_what_is_locked() -> None:
    installs = [line.partition("pip install --quiet ")[2] for line in lines_of("setup") if "pip install" in line]
    assert installs[0] == "--no-deps --require-hashes --requirement locked.txt"
    assert "grep '^torch=='" in installs[1] and "--no-build-isolation --editable" in installs[2]
    assert len(installs) == 3


def test_the_list_of_what_is_installed_is_written_by_a_tool_of_cyclonedx() -> None:
    last = lines_of("sbom")[-1]
    assert re.search(r"bin/cyclonedx-py environment .*-o runs/\S+\.json \.venv/bin/python$", last)

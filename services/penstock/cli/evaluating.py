"""`penstock models`: the commands that train, and `eval`, which needs a mesh."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from penstock.cli.hub import model_directory
from penstock.cli.mesh import MeshOptions
from penstock.cli.running import running_mesh
from penstock.cli.up import reporting
from penstock.cli.view import View
from penstock.engine.config import EngineSettings
from penstock.models import NAMES
from penstock.models.cli import app as training
from penstock.models.cli import prepare
from penstock.models.sessions import KINDS, ToolKind
from penstock.runtime.config import ConfigError

if TYPE_CHECKING:
    from penstock.models.judging import Tally

app = App(name="models", help="Trains and evaluates the embedded models.")
app.command(training, name="*")
_Asking = Callable[[str], Awaitable["Tally"]]
"""Asks the mesh at a URL."""


@app.command(name="eval")
def evaluate(
    directory: str = NAMES[0],
    *,
    draft: str = "",
    count: int = 24,
    seed: int = 1,
    kinds: Annotated[tuple[ToolKind, ...], Parameter(negative=())] = KINDS,
    threads: int = 0,
    url: str = "",
    free: Annotated[bool, Parameter(negative=())] = False,
    json: bool = False,
) -> int:
    """Measures a model, and its draft, on held-out tools, words and phrasings.

    A plain greedy decoder writes every turn freely. Calls and JSON answers are asked of a mesh as well, in the way of
    an agent framework, where grammars hold: that is the second column.

    Args:
        directory: the model: a directory, or the name of an embedded one.
        draft: its draft; the sibling directory `NAME-draft` unless told, none if there is no such directory.
        count: sessions per kind.
        seed: of the evaluation data, which shares nothing with training whatever the seed.
        kinds: kinds of tool sessions.
        threads: CPU threads.
        url: a mesh that serves the model, such as http://127.0.0.1:8080; one is started unless told.
        free: leave out the mesh and the second column.
        json: print one JSON object and nothing else.
    """
    if count < 1:
        raise ConfigError("count", count, "must be at least 1")
    model = model_directory("directory", directory)
    pair = model_directory("draft", draft) if draft else model.with_name(f"{model.name}-draft")
    served: list[Tally] = []
    if not free:
        options = MeshOptions(
            port=0,
            models=(directory,),
            draft=str(pair) if pair.is_dir() else "none",
            aggregated=True,
            engine=EngineSettings(threads=threads),
        )
        ask = partial(ask_mesh, options.names[0], model, count=count, seed=seed, kinds=kinds)
        if code := reporting(options, partial(second_column, options, url.rstrip("/"), ask, served)):
            return code
    prepare(threads)
    from penstock.models.evaluate import evaluate as measure
    from penstock.models.report import table

    report = measure(
        model,
        pair if pair.is_dir() else None,
        count=count,
        seed=seed,
        kinds=kinds,
        note=lambda text: print(text, file=sys.stderr),
        served=served[0] if served else None,
    )
    print(dumps(report) if json else table(report))
    return 0


async def second_column(options: MeshOptions, url: str, ask: _Asking, into: list[Tally], view: View) -> int:
    """Asks the mesh at `url`, or one of its own. Returns the exit code."""
    try:
        from openai import OpenAIError
    except ImportError as error:
        view.failed(f"{error}; a mesh is asked by the official client: pip install 'penstock[demo]', or use --free")
        return 2
    try:
        if url:
            view.quiet()
            into.append(await ask(url))
            return 0
        async with running_mesh(options, view) as mesh:
            view.ready("asking it for calls and JSON")
            into.append(await ask(mesh.url))
    except OpenAIError as error:
        view.failed(f"{url or 'the mesh'}: the evaluation broke off: {error}")
        return 1
    return 0


async def ask_mesh(name: str, model: Path, url: str, *, count: int, seed: int, kinds: Sequence[str]) -> Tally:
    """The column of a mesh that serves the `model` by that name. Raises OpenAIError."""
    from openai import AsyncOpenAI

    from penstock.models.served import score_served
    from penstock.models.tokenizer import load

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return await score_served(client, name, load(model), count=count, seed=seed, kinds=kinds)

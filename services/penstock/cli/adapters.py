"""`penstock ctl lora`: which LoRA adapters a running mesh serves; loads and unloads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.table import Table

from penstock.cli.asking import NOWHERE, AsJson, Mesh, MeshAccess, done, members, of_first
from penstock.errors import InvalidRequest
from penstock.rpc.shown.figures import Json, role_of
from penstock.v1 import router_pb2, router_pb2_grpc

_CALL_S = 90.0
"""Workers read whole adapters."""

app = App(name="lora", help="Shows the LoRA adapters of a running mesh, loads and unloads them.")


@app.command
def load(adapter: str, *, model: str = "", mesh: Mesh = NOWHERE, as_json: AsJson = False) -> int:
    """Has every worker of a model load an adapter; clients ask for MODEL:NAME. One of that name is replaced.

    Parameters
    ----------
    adapter:
        NAME=DIR: its name, and a directory in the format of PEFT that each worker can read.
    model:
        The model's name; not needed where there is only one.
    as_json:
        Writes one JSON object instead of a table.
    """
    name, _, directory = adapter.partition("=")
    path = str(Path(directory).expanduser().resolve()) if directory else ""
    return _done(_change(mesh, model, name, path, f"{adapter!r}: must be NAME=DIR" if not path else ""), as_json)


@app.command
def unload(adapter: str, *, model: str = "", mesh: Mesh = NOWHERE, as_json: AsJson = False) -> int:
    """Has every worker of a model forget an adapter: what runs with it ends as it would have, new requests are refused.

    Parameters
    ----------
    adapter:
        Its name.
    model:
        The model's name; not needed where there is only one.
    as_json:
        Writes one JSON object instead of a table.
    """
    return _done(_change(mesh, model, adapter, "", ""), as_json)


@app.command(name="list")
def list_all(*, mesh: Mesh = NOWHERE, as_json: AsJson = False) -> int:
    """Shows the adapters, and how many workers of their model have them.

    Parameters
    ----------
    as_json:
        Writes one JSON list instead of a table.
    """
    return done(_listed(mesh), _show_all, lambda found: found, as_json=as_json)


async def _change(mesh: MeshAccess, model: str, name: str, directory: str, misfit: str) -> Json:
    """Loads an adapter, or unloads it where there is no directory; `misfit` says what is wrong with the words given."""
    if misfit:
        raise InvalidRequest(f"adapter = {misfit}", field="adapter")
    request = router_pb2.AdapterRequest(model_name=model, name=name, directory=directory)

    async def tell(stub: router_pb2_grpc.RouterAsyncStub) -> router_pb2.AdapterResponse:
        return await stub.ChangeAdapter(request, timeout=_CALL_S)

    answer = await of_first(mesh, tell)
    return {
        "model": answer.model_name,
        "adapter": name,
        "asked_for_as": f"{answer.model_name}:{name}",
        "workers": [
            {
                "id": one.member_id,
                "address": one.address,
                "role": role_of(one),
                "done": one.answered and not one.error,
                "error": one.error if one.answered else "no answer",
            }
            for one in answer.workers
        ],
    }


async def _listed(mesh: MeshAccess) -> list[Json]:
    joined = (await of_first(mesh, members)).members
    found: dict[tuple[str, str, str], Json] = {}
    for member in joined:
        for one in member.adapters:
            own = found.setdefault(
                (member.model_name, one.name, one.fingerprint),
                {
                    "model": member.model_name,
                    "adapter": one.name,
                    "asked_for_as": f"{member.model_name}:{one.name}",
                    "fingerprint": one.fingerprint,
                    "directory": one.directory,
                    "workers": 0,
                    "of": sum(other.model_name == member.model_name for other in joined),
                },
            )
            own["workers"] += 1
    return [found[key] for key in sorted(found)]


def _done(asking: Any, as_json: bool) -> int:
    """Prints what came of it. Returns the exit code: 1 when a worker has not done it."""
    return done(
        asking,
        _show,
        lambda found: found,
        as_json=as_json,
        code=lambda found: int(not all(worker["done"] for worker in found["workers"])),
    )


def _show(found: Json) -> None:
    table = Table(box=None)
    for column in ("worker", "role", "adapter", "result"):
        table.add_column(column, no_wrap=column == "worker")
    for worker in found["workers"]:
        said = "done" if worker["done"] else worker["error"]
        table.add_row(worker["address"], worker["role"], found["adapter"], said)
    Console(markup=False, highlight=False).print(table)


def _show_all(found: list[Json]) -> None:
    table = Table(box=None)
    for column in ("asked for as", "workers", "fingerprint", "directory"):
        table.add_column(column, no_wrap=column == "asked for as")
    for one in found:
        have = f"{one['workers']} of {one['of']}"
        table.add_row(one["asked_for_as"], have, one["fingerprint"][:16], one["directory"])
    Console(markup=False, highlight=False).print(table)

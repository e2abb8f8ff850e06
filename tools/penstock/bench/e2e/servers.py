"""The servers that are measured: ours in its forms, and the peers'; how each is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.engine.shapes import LlamaShape
from penstock.bench.engine.subjects import Places
from penstock.load.target import Endpoint, LoadTarget

MESH = "mesh"
"""The mesh as `penstock up` comes."""
THREADS, STREAMS, TOKENS, ROOM = 2, 32, 4096, 40960
"""What the peers are told; see loadtest/peers/servers/options.py. 16 agents have room that share nothing."""
_RETRIES = 1_000_000
"""Of a refusal: as many as fit into the time of a request."""
_BUDGET = 16 << 30
"""Bytes that servers may take which are there together."""
_COPIES = {"vllm": 3.5, "openvino": 1.1}
"""The weights in memory as a multiple of the checkpoint, at most; vLLM's on a processor without bfloat16."""
_MESH_BYTES = 3 << 30
"""Two pools, an arena and the processes, at most; forms of the mesh have one copy of the weights together."""
_APART = ("--prefill", "1", "--decode", "1")


@dataclass(frozen=True, slots=True)
class MeshForm:
    """How the mesh is started."""

    options: Sequence[str] = ()
    """Of `penstock up`."""
    environment: Mapping[str, str] = field(default_factory=dict)


MESHES: Mapping[str, MeshForm] = {
    MESH: MeshForm(),
    "mesh_disaggregated": MeshForm(_APART),
    "mesh_aggregated": MeshForm(("--aggregated",)),
    "mesh_turns": MeshForm(_APART, {"PENSTOCK_PREFILL_BATON": "auto", "PENSTOCK_DECODE_BATON": "auto"}),
}
"""Forms of the mesh. With turns, workers that are apart share their cores by agreement: docs/design/baton.md."""
PEERS = ("llamaserver", "vllm", "openvino")
USUAL = (MESH, "mesh_disaggregated", "mesh_aggregated", *PEERS)
"""Measured if nothing else is asked for."""
SERVERS = (*MESHES, *PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """A program that serves the model on a port of 127.0.0.1."""

    name: str
    command: Sequence[str]
    model: str
    """Its name there."""
    ready_path: str
    """Answers 200 when a request would succeed."""
    paused: bool
    """Whether it is stopped while others are measured. The mesh is not: it would take the pause for a failure."""
    endpoint: Endpoint = "completions"
    environment: Mapping[str, str] = field(default_factory=dict)

    def target(self, port: int) -> LoadTarget:
        """For clients that ask with ids of tokens for greedy answers, until they are let in."""
        return LoadTarget(
            host="127.0.0.1",
            port=port,
            tls=False,
            prefix="" if self.endpoint == "llamaserver" else "/v1",
            endpoint=self.endpoint,
            model=self.model,
            retries=_RETRIES,
            extra={"temperature": 0},
        )


def mesh(name: str, model: Path, port: int, *more: str) -> ServerSpec:
    """One of the forms of the mesh, in bfloat16 and without drafts: the text of random weights repeats itself, which
    drafts would make use of and no peer does."""
    form = MESHES[name]
    environment = {"PENSTOCK_DECODE_DRAFT_TOKENS": "0", **form.environment}
    return up(name, model, port, MeshForm(("--dtype", "bfloat16", *form.options, *more), environment))


def up(name: str, model: Path, port: int, form: MeshForm) -> ServerSpec:
    """A mesh as it comes, but for what the form says."""
    command = (sys.executable, "-m", "penstock.cli", "up", "--model", str(model), "--port", str(port))
    return ServerSpec(
        name=name,
        command=(*command, *form.options),
        model=model.name,
        ready_path="/readyz",
        paused=False,
        environment=form.environment,
    )


def peer(name: str, model: Path, port: int, places: Places, *more: str, **sizes: int) -> ServerSpec:
    """Another server, from its environment; `sizes` instead of those above, and `more` options. Raises Failed when
    there is none."""
    told = {"port": port, "threads": THREADS, "streams": STREAMS, "tokens": TOKENS, "room": ROOM, **sizes}
    arguments = [*(text for option, value in told.items() for text in (f"--{option}", str(value))), *more]
    command = (str(places.interpreter(name)), "-m", f"loadtest.peers.servers.{name}", "--model", str(model))
    return ServerSpec(
        name=name,
        command=(*command, *arguments),
        model=model.name,
        endpoint="llamaserver" if name == "llamaserver" else "completions",
        ready_path="/health",
        paused=True,
    )


def sittings(names: Sequence[str], shape: LlamaShape, weights: int, budget: int = _BUDGET) -> list[tuple[str, ...]]:
    """Groups of servers that fit into memory together, `MESH` in each of them if it is wanted.

    `weights` in bytes. One that fits with nothing but `MESH` gets it for itself, whatever the budget.
    """

    def needs(name: str) -> float:
        if name in MESHES:
            return _MESH_BYTES
        return weights * _COPIES.get(name, 1.0) + 2 * ROOM * shape.kv_bytes

    always = tuple(name for name in names if name == MESH)
    groups = [always]
    for name in names:
        if name in always:
            continue
        if groups[-1] != always and weights + sum(map(needs, (*groups[-1], name))) > budget:
            groups.append(always)
        groups[-1] = (*groups[-1], name)
    return groups

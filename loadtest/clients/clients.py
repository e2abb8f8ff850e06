"""Which clients there are, and one run of one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.clients.install import installed, interpreter, of_node, place
from loadtest.clients.served import MODEL, Doors
from loadtest.peers import install as peers
from penstock.models import embedded

CASES = Path(__file__).parent / "cases"
OK = "ok"
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client that nobody here wrote, and the file of its cases."""

    name: str
    environment: str
    file: str
    note: str = ""
    """What the cases do that is not the client's default."""
    peer: bool = False
    """Whether its environment is that of a peer, of `loadtest.peers.install`."""

    @property
    def missing(self) -> str:
        """How its environment is made, where it is not there."""
        there = peers.interpreter(self.environment).is_file() if self.peer else installed(self.environment)
        return "" if there else f"python -m loadtest.{'peers' if self.peer else 'clients'}.install {self.environment}"

    @property
    def interpreter(self) -> Path:
        """Runs its cases."""
        return peers.interpreter(self.environment) if self.peer else interpreter(self.environment)


CLIENTS = (
    Client("openai, Python", "agents", "openai_python.py"),
    Client("openai, Node", "node", "openai_node.mjs"),
    Client("anthropic, Python", "agents", "anthropic_case.py"),
    Client("openai-agents, Python", "agents", "openai_agents.py"),
    Client("@openai/agents, Node", "node", "openai_agents_node.mjs"),
    Client("pydantic-ai", "agents", "pydantic_ai_case.py"),
    Client("instructor", "agents", "instructor_case.py"),
    Client("langchain-openai, LangGraph", "frameworks", "langchain_case.py"),
    Client(
        "llama-index",
        "frameworks",
        "llama_index_case.py",
        "a reader is cancelled: a stream that is closed keeps its connection",
    ),
    Client("litellm", "frameworks", "litellm_case.py"),
    Client(
        "smolagents",
        "frameworks",
        "smolagents_case.py",
        "the model closes its connections: a stream that is closed keeps its own",
    ),
    Client("AI SDK, Node", "node", "ai_sdk.mjs"),
    Client(
        "opencode",
        "opencode",
        "opencode.mjs",
        "an agent with a short prompt: that of the default one is longer than this model's context",
    ),
    Client("grpc-requests, by reflection", "grpc", "grpc_case.py"),
    Client("aiperf", "load", "aiperf_case.py"),
    Client("vllm bench serve", "vllm", "vllm_case.py", peer=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a client's cases."""

    client: str
    seconds: float
    versions: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    cases: Mapping[str, str]
    """By name: `ok`, or what went wrong."""

    @property
    def unchanged(self) -> bool:
        """Whether the client works as it is: every case does."""
        return bool(self.cases) and set(self.cases.values()) == {OK}


def run(client: Client, doors: Doors) -> Tried:
    """Runs the client's cases in its environment."""
    begin = time.monotonic()

    def tried(cases: Mapping[str, str], versions: Mapping[str, str] | None = None) -> Tried:
        seconds = time.monotonic() - begin
        return Tried(client=client.name, seconds=seconds, versions=versions or {}, cases=cases, note=client.note)

    if client.missing:
        return tried({"start": f"not installed: {client.missing}"})
    environment = {
        **os.environ,
        "PENSTOCK_URL": doors.url,
        "PENSTOCK_GRPC": doors.grpc,
        "PENSTOCK_MODEL": MODEL,
        "PENSTOCK_MODEL_DIR": str(embedded(MODEL)),
    }
    try:
        command = (client.interpreter, _where(client) / client.file)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        return tried({"start": str(error)})
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        return tried(said["cases"], said["versions"])
    except (IndexError, ValueError, KeyError, TypeError):
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return tried({"start": lines[-1] if lines else f"ended with {done.returncode}"})


def _where(client: Client) -> Path:
    """The directory to run the file in. Node looks for modules beside the file, so it gets a copy beside them."""
    if not of_node(client.environment):
        return CASES
    copy = place() / client.environment / "cases"
    shutil.copytree(CASES, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return copy

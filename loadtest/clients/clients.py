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

from loadtest.clients.install import NODE, installed, interpreter, place
from loadtest.clients.served import MODEL

CASES = Path(__file__).parent / "cases"
OK = "ok"
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client that nobody here wrote, and the file of its cases."""

    name: str
    environment: str
    file: str


CLIENTS = (
    Client("openai, Python", "agents", "openai_python.py"),
    Client("openai, Node", NODE, "openai_node.mjs"),
    Client("anthropic, Python", "agents", "anthropic_case.py"),
    Client("openai-agents, Python", "agents", "openai_agents.py"),
    Client("@openai/agents, Node", NODE, "openai_agents_node.mjs"),
    Client("pydantic-ai", "agents", "pydantic_ai_case.py"),
    Client("instructor", "agents", "instructor_case.py"),
    Client("langchain-openai, LangGraph", "frameworks", "langchain_case.py"),
    Client("llama-index", "frameworks", "llama_index_case.py"),
    Client("litellm", "frameworks", "litellm_case.py"),
    Client("smolagents", "frameworks", "smolagents_case.py"),
    Client("AI SDK, Node", NODE, "ai_sdk.mjs"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a client's cases."""

    client: str
    seconds: float
    versions: Mapping[str, str] = field(default_factory=dict)
    cases: Mapping[str, str]
    """By name: `ok`, or what went wrong."""

    @property
    def unchanged(self) -> bool:
        """Whether the client works as it is: every case does."""
        return bool(self.cases) and set(self.cases.values()) == {OK}


def run(client: Client, url: str) -> Tried:
    """Runs the client's cases in its environment."""
    begin = time.monotonic()

    def tried(cases: Mapping[str, str], versions: Mapping[str, str] | None = None) -> Tried:
        return Tried(client=client.name, seconds=time.monotonic() - begin, versions=versions or {}, cases=cases)

    if not installed(client.environment):
        return tried({"start": f"not installed: python -m loadtest.clients.install {client.environment}"})
    environment = {**os.environ, "PENSTOCK_URL": url, "PENSTOCK_MODEL": MODEL}
    try:
        command = (interpreter(client.environment), _where(client) / client.file)
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
    if client.environment != NODE:
        return CASES
    copy = place() / NODE / "cases"
    shutil.copytree(CASES, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return copy

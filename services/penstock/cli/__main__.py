"""`penstock`: the command line of the whole project."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import App, Parameter

from penstock.cli.mesh import DemoOptions, MeshOptions
from penstock.runtime.config import COMMAND, ConfigError, sources

_Unnamed = Annotated[str, Parameter(show=False)]
_SERVICES = {
    "gateway": "The door: OpenAI's HTTP API, and gRPC.",
    "router": "Decides where requests go.",
    "prefill": "A worker that computes prompts.",
    "decode": "A worker that generates; with --role both it computes prompts too.",
    "kvstore": "Keeps computed prompts for the next turn.",
    "draft": "Proposes tokens that decode verifies.",
    "stage": "Computes some layers of a model for a worker on another host.",
    "picker": "Tells an Envoy to which gateway a request goes.",
}


def make_app() -> App:
    """The command line. What is not asked for is not imported."""
    app = App(
        name="penstock", help="Serves language models as a mesh of services whose KV cache outlives turns and crashes."
    )
    app.command(_mesh_command("up", _up))
    app.command(_mesh_command("demo", _demo))
    # The benches stand above the services, so they are named here and not imported: cyclopts imports what a name
    # stands for when that command is asked for.
    app.command("penstock.bench:app", name="bench", help="Measures the mesh beside its limits and its peers.")
    app.command(
        "penstock.simulator.command:app", name="simulate", help="Serves recorded requests with a modelled mesh."
    )
    app.command("penstock.load.command:app", name="load", help="Loads any server with OpenAI's API, open loop.")
    app.command("penstock.gateway.accounts.commands:app", name="keys", help="Adds, lists and revokes API keys.")
    certificates = "Makes the certificates by which the members of a mesh know each other."
    app.command("penstock.cli.authority:app", name="ca", help=certificates)
    app.command("penstock.cli.planning:app", name="plan", help="Sizes a model for GPUs, before any of them is there.")
    app.command("penstock.cli.ctl:app", name="ctl", help="Shows what a mesh does and why, and changes it.")
    app.command(
        _service("scale", "Has as many workers of each role there as targets need.", module="penstock.cli.scale")
    )
    app.command("penstock.cli.evaluating:app", name="models", help="Trains and evaluates the embedded models.")
    for service, what in _SERVICES.items():
        app.command(_service(service, what))
    return app


def main() -> None:
    """The entry point."""
    # Before gRPC is imported: its fork handlers run in every child that uvloop forks, as in the benches, and may end it
    # before it is a process of its own.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        make_app()()
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)


def _up(*unnamed: _Unnamed, options: Annotated[MeshOptions | None, Parameter(name="*")] = None) -> int:
    """Starts the whole mesh on this host and prints `ready URL` when a request would succeed; Ctrl-C stops it."""
    from penstock.cli.up import up

    _check_named("up", unnamed)
    return up(options or MeshOptions())


def _demo(*unnamed: _Unnamed, options: Annotated[DemoOptions | None, Parameter(name="*")] = None) -> int:
    """Starts the mesh on a free port, plays a session of several turns with tools, and shows what was cached; then asks
    for the calls of sessions that the model has never seen, and counts the right ones."""
    from penstock.cli.demo import demo

    _check_named("demo", unnamed)
    return demo(options or DemoOptions())


def _check_named(command: str, unnamed: Sequence[str]) -> None:
    if unnamed:
        print(
            f"penstock: did you mean `penstock {command} --model {unnamed[0]}`? Settings have names.", file=sys.stderr
        )
        sys.exit(2)


def _mesh_command(name: str, run: Callable[..., int]) -> App:
    """A command with settings: command line, then PENSTOCK_UP_PORT, then `port` in the table [up] of penstock.toml."""
    app = App(name=name, help=run.__doc__ or "", config=sources(name))
    app.default(run)
    return app


def _service(service: str, what: str, module: str = "") -> App:
    """A command that becomes `python -m penstock.<service>`, or `module`: its own help, its own settings."""
    app = App(name=service, help=what, group="Services", help_flags=[], version_flags=[])

    def start(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
        os.environ[COMMAND] = f"penstock {service}"
        os.execv(sys.executable, [sys.executable, "-m", module or f"penstock.{service}", *arguments])

    app.default(start)
    return app


if __name__ == "__main__":
    main()

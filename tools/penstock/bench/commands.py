"""The command line of the benches."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from penstock.bench.harness import BenchReport
from penstock.bench.printing import show

app = App(name="bench", help="Measure, beside a peer or a limit in the same run.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a bench runs and what it prints."""

    json: bool = False
    """Print one JSON object and nothing else."""
    markdown: bool = False
    """Print the section that docs/measured.md would have of this run."""
    quick: bool = False
    """Fewer and shorter rounds."""


Options = Annotated[Output | None, Parameter(name="*")]


def _run(
    bench: Callable[[bool], Coroutine[Any, Any, BenchReport]],
    options: Output | None,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    options = options or Output()
    with asyncio.Runner(loop_factory=loop) as runner:
        try:
            report = runner.run(_cancelled_by_sigterm(bench(options.quick)))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)
    show(report, as_json=options.json, as_markdown=options.markdown)


async def _cancelled_by_sigterm(work: Coroutine[Any, Any, BenchReport]) -> BenchReport:
    """Else the servers, which run in sessions of their own, would outlive a bench that is told to end."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


@app.command
def overhead(options: Options = None) -> None:
    """The whole mesh beside the same engine driven in one process: TTFT and tokens/s, 1 and 8 streams."""
    from penstock.bench.overhead import measure

    _run(measure, options)


@app.command
def engine(options: Options = None) -> None:
    """The bare engine beside other engines, memory and torch: two shapes with random weights, and the embedded model.

    Peers are those that `python -m loadtest.peers.install` has put under $PENSTOCK_PEERS, else runs/peers.
    """
    import uvloop  # what the workers run on

    from penstock.bench.engine.measure import measure

    _run(measure, options, uvloop.new_event_loop)


@app.command
def e2e(
    options: Options = None,
    *,
    shape: Literal["135m", "1b"] = "135m",
    cells: tuple[str, ...] = (),
    servers: tuple[str, ...] = (),
    ablations: bool = False,
    rounds: int = 0,
    peers: Path | None = None,
) -> None:
    """The whole mesh as a user meets it beside llama-server, vLLM's server and OpenVINO: agents, fan-out, plain load.

    Parameters
    ----------
    shape:
        Of the model, which has random weights.
    cells:
        Only these cells, such as agents_8. Default: all.
    servers:
        Only these, such as mesh or vllm. Default: the mesh in three forms, and all peers that are installed.
    ablations:
        Instead of all that: the mesh of the embedded model with and without affinity, store, shared pages, drafts and
        disaggregation, one at a time; --cells draft is of that one only.
    rounds:
        Times that every server gets every load. Default: 3, or 1 with --quick.
    peers:
        Where `python -m loadtest.peers.install` has put the peers. Default: $PENSTOCK_PEERS, else runs/peers.
    """
    import uvloop

    from penstock.bench.e2e.measure import E2eOptions, measure

    quick = bool(options and options.quick)
    wanted = E2eOptions(
        shape=shape,
        quick=quick,
        cells=cells,
        servers=servers,
        ablations=ablations,
        rounds=rounds or (1 if quick else 3),
        peers=peers,
    )
    _run(lambda _quick: measure(wanted), options, uvloop.new_event_loop)


@app.command
def kv(options: Options = None) -> None:
    """The KV store beside memcpy, TCP, a grpc stream, the file system and an empty call."""
    import uvloop  # what the services run on

    from penstock.bench.kv.measure import measure
    from penstock.runtime.telemetry import telemetry

    with telemetry("bench", "error"):
        _run(measure, options, uvloop.new_event_loop)


@app.command
def gateway(options: Options = None) -> None:
    """The gateway before a mesh that emits at will: events/s of a core beside a bare SSE application, a token's way,
    three times the load that it can take, and the next turn of long conversations."""
    import uvloop  # what the gateway runs on

    from penstock.bench.gateway.measure import measure

    _run(measure, options, uvloop.new_event_loop)


@app.command
def masked(options: Options = None) -> None:
    """Text that keeps to a grammar beside text that does not: seconds per token, 1 and 16 streams."""
    import uvloop  # what the workers run on

    from penstock.bench.gateway.masked import measure

    _run(measure, options, uvloop.new_event_loop)


@app.command
def router(
    options: Options = None,
    *,
    part: list[Literal["decisions", "policies", "hints", "simulator", "roles"]] | None = None,
    trace: list[Path] | None = None,
) -> None:
    """What a decision of the router costs: long and short prompts, new and known sessions, 10 to 1,000 workers. And how
    good it is: all policies on recorded workloads, before modelled workers, and ours without names of sessions and
    without stores. How far such a model is off beside a real mesh, whose rates `penstock simulate --rates` reads, and
    what it is worth there to prefill and decode apart.

    Parameters
    ----------
    part:
        Only these. Default: all.
    trace:
        Workloads as `penstock simulate` reads them. Default: those in loadtest/traces.
    """
    from penstock.bench.router.measure import measure

    _run(lambda quick: measure(quick, part or (), trace or ()), options)


@app.command
def cores(options: Options = None) -> None:
    """The bare engine on cores that another process uses, and steps of eight streams at contexts of agents."""
    from penstock.bench.engine.cores import measure

    _run(measure, options)


@app.command
def speculation(
    options: Options = None,
    *,
    part: list[Literal["replay", "trees", "rows", "mesh", "branches", "delay", "heads", "peers"]] | None = None,
    trace: list[Path] | None = None,
    head: Path | None = None,
) -> None:
    """What drafts are worth: tokens of a verify step with guesses by lookup, on recorded sessions of agents, and with a
    second branch; what steps take that verify drafts; tokens per second with drafts and without, through the mesh, of
    the embedded pair and of one that reads many weights; what drafts for the likeliest other outcome could bring at
    most; tokens per second with a drafter that is right as often as it is told to be, behind a slow link, and with a
    draft head in the worker and in the draft service; tool calls beside other servers that speculate.

    Parameters
    ----------
    part:
        Only these. Default: all.
    trace:
        Recorded requests with their texts; may be given more than once. Default: the excerpt in loadtest/traces/texts.
    head:
        Directory of a draft head for the embedded model, as `penstock models head` writes one. Default: none.
    """
    from penstock.bench.speculation.measure import measure

    _run(lambda quick: measure(quick, part or (), trace or (), head), options)


@app.command
def failover(options: Options = None) -> None:
    """What clients see when a service is killed or stopped in the middle of their streams: gaps, lost streams, wrong
    tokens."""
    from penstock.bench.failover.measure import measure

    _run(measure, options)


@app.command
def soak(
    options: Options = None, *, requests: int | None = None, seconds: float | None = None, seed: int | None = None
) -> None:
    """A mesh of real processes with all features on, whose services are killed and stopped every few seconds while 30 %
    of the clients leave in the middle: streams lost, wrong tokens, what leaks, and how memory and latency change. What
    is wrong is told on standard error.

    Parameters
    ----------
    requests:
        Of clients, all together. Default: 50,000, or 1,500 with --quick.
    seconds:
        For the part with faults at most. Default: as long as the requests take.
    seed:
        Draws the requests, who leaves and the faults.
    """
    from penstock.bench.soak.measure import measure
    from penstock.bench.soak.options import QUICK, SoakOptions

    base = QUICK if options and options.quick else SoakOptions()
    given: dict[str, Any] = {"requests": requests, "seconds": seconds, "seed": seed}
    wanted = replace(base, **{name: value for name, value in given.items() if value is not None})
    _run(lambda _quick: measure(wanted), options)


@app.command
def evict(options: Options = None, *, trace: list[Path] | None = None) -> None:
    """Eviction policies on recorded requests, beside LRU and the offline optimum.

    Parameters
    ----------
    trace:
        A file of recorded requests; may be given more than once. Without it, those in ../shared/traces.
    """
    from penstock.bench.evict.measure import default_traces, measure

    _run(lambda quick: measure(trace or default_traces(), quick), options)


@app.command
def batch(options: Options = None) -> None:
    """What a batch of a thousand lines costs those who are served live beside it, and what it makes of the rest."""
    import uvloop

    from penstock.bench.batch import measure

    _run(measure, options, uvloop.new_event_loop)


@app.command
def scale(
    options: Options = None,
    *,
    workload: list[Literal["square", "seesaw", "conversation"]] | None = None,
    trace: list[Path] | None = None,
) -> None:
    """The planner of `penstock scale` beside the best split of workers that stay, and beside an autoscaler by
    utilisation: worker time and requests within their targets, before modelled workers that take time to start.

    Parameters
    ----------
    workload:
        Only these. Default: all.
    trace:
        Instead of them, workloads as `penstock simulate` reads them, or CSV files of lengths as Azure publishes them.
    """
    from penstock.bench.scale import measure

    options = options or Output()
    report = measure(options.quick, workload or (), trace or ())
    show(report, as_json=options.json, as_markdown=options.markdown)


@app.command
def operate(options: Options = None, *, part: list[str] | None = None) -> None:
    """What operators ask of a mesh beside its speed: how late the client of `penstock load` sends, what a batch takes
    from live requests, what the planner saves, what axe finds in the console, how large the images are.

    Parameters
    ----------
    part:
        Only these: load, batch, planner, console, images. Default: all.
    """
    import uvloop

    from penstock.bench.operate.measure import measure

    _run(lambda quick: measure(quick, part or ()), options, uvloop.new_event_loop)


@app.command
def trust(options: Options = None, *, part: list[str] | None = None) -> None:
    """What guards cost and what tests notice: Unix sockets beside ports, as a client of the mesh sees them; sealed
    blocks beside plain ones and memcpy; how many attacks are tried among the tests, and how many succeed; what clients
    notice of every fault of every service; how many of 200 small changes of the code that decides make a test fail,
    which takes half an hour.

    Parameters
    ----------
    part:
        Only these: sockets, sealing, attacks, faults, mutants. Default: all.
    """
    import uvloop

    from penstock.bench.trust.measure import measure
    from penstock.runtime.telemetry import telemetry

    with telemetry("bench", "error"):
        _run(lambda quick: measure(quick, part or ()), options, uvloop.new_event_loop)


@app.command
def large(options: Options = None, *, part: list[str] | None = None) -> None:
    """What large models are made of, at a size that fits here: architectures that equal transformers; what latent
    attention keeps of a token; what is fetched of a long prefix where layers forget; experts of which each token uses a
    few, beside other engines on the same weights; models of the forms of DeepSeek V3 and Llama 4 beside transformers,
    and what latent attention takes over a long context; one model over two processes; eight streams, each with an
    adapter of its own, beside eight of the base model; and encoders of pictures.

    Peers are those that `python -m loadtest.peers.install` has put under $PENSTOCK_PEERS, else runs/peers.

    Parameters
    ----------
    part:
        Only these: families, kv, fetch, experts, forms, ranks, lora, pictures. Default: all.
    """
    import uvloop  # what the workers run on

    from penstock.bench.large.measure import measure
    from penstock.runtime.telemetry import telemetry

    with telemetry("bench", "error"):
        _run(lambda quick: measure(quick, part or ()), options, uvloop.new_event_loop)


@app.command
def paired(other: Path, name: str, *, rounds: int = 3, quick: bool = False, json: bool = False) -> None:
    """A bench here and in another checkout, in turns: the ratio of each figure, here : there.

    Parameters
    ----------
    other:
        The other checkout, with a .venv of its own.
    name:
        Of the bench: overhead, engine, kv, gateway or evict.
    rounds:
        Runs in each checkout; the two of a round take turns, sample by sample.
    quick:
        Runs of the bench with --quick.
    """
    from penstock.bench.paired import Checkout, checkout, measure

    here, there = Checkout(Path.cwd(), Path(sys.executable)), checkout(other)
    show(asyncio.run(measure(here, there, name, rounds=rounds, quick=quick)), as_json=json)


@app.command
def house(*, root: Path = Path(), json: bool = False, markdown: bool = False) -> None:
    """The source itself: sizes, signatures, docstrings, floors and arrows.

    Parameters
    ----------
    root:
        The checkout to read.
    """
    from penstock.bench.house.measure import measure

    show(measure(root), as_json=json, as_markdown=markdown)


@app.command
def measured(*, results: Path = Path("loadtest/results"), output: Path = Path("docs/measured.md")) -> None:
    """Writes docs/measured.md from the results of all benches.

    Parameters
    ----------
    results:
        Where `penstock bench NAME --json > NAME.json` was kept.
    output:
        The file to write.
    """
    from penstock.bench.measured.document import document

    output.write_text(document(results), encoding="utf-8")


@app.command(name="all")
def everything(options: Options = None) -> None:
    """Every bench that needs no recordings, one after the other; without e2e, which takes hours."""
    engine(options)
    overhead(options)
    cores(options)
    kv(options)
    gateway(options)
    router(options)

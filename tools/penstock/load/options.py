"""What a load is asked for, and what is made of that."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from penstock.load.errors import LoadError
from penstock.load.metrics import LoadSlo
from penstock.load.mixes import mixed, parse_mix, read_mix
from penstock.load.planning import Playing
from penstock.load.target import LoadTarget, Tools, parsed
from penstock.load.wording import FIRST_ID
from penstock.traces.reading import Trace, TraceError, load, load_lengths
from penstock.traces.shaping import shrunk

_SESSIONS = 8
"""Of a mix, where --limit names no number."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The settings of `penstock load`."""

    url: str = "http://127.0.0.1:8080"
    """A server with OpenAI's API; /v1 is added where the address has no path."""
    endpoint: Literal["chat", "completions"] = "chat"
    """`completions`: /v1/completions, with prompts of random token ids, which are exactly as long as planned; models
    without a chat template have it too."""
    vocab: int = 1000
    """With completions, ids of tokens are drawn from 300 up to this number; the model has to have as many."""
    model: str = ""
    """Default: the first that the server lists."""
    api_key: Annotated[str, Parameter(env_var="PENSTOCK_LOAD_API_KEY", show_default=False)] = field(
        default="", repr=False
    )
    """Sent as a bearer token; better in the environment (PENSTOCK_LOAD_API_KEY)."""
    session_header: str = "x-session-affinity"
    """The header that names the session, where the trace has sessions; empty: none does."""
    ignore_eos: bool = True
    """Ask for answers that are as long as in the trace, by a field that OpenAI's own service refuses."""
    tools: Tools = "auto"
    """Send the tools of the trace as tools. `required`: where the trace has a call of one, the answer has to be one,
    however long; `none`: their text is a part of the system prompt."""
    extra: str = ""
    """A JSON object with further fields of every request, such as {"temperature": 0}."""
    timeout: float = 600.0
    """Seconds after which a request has failed."""
    retries: int = 0
    """How often a request is sent again that was refused with 429 or 503, when the server says; its time goes on."""

    mix: tuple[str, ...] = ()
    """Made-up sessions instead of a trace, such as turns=5,system=1200,new=150,output=64,think=2; once for each kind.
    Also: share, tools, agents, spread, name."""
    speed: float = 1.0
    """Play the trace so many times faster: times and think times."""
    rate: float = 0.0
    """Sessions, or requests without one, that begin per second, at random, instead of at the times of the trace."""
    limit: int = 0
    """The first sessions of the trace alone; requests without a session count as one. Of a mix: 8 if not given."""
    turns: int = 0
    """The first turns of each session alone."""
    duration: float = 0.0
    """Send nothing that is due after so many seconds. What was sent is waited for."""
    max_think: float = 0.0
    """Think time at most, in seconds, as played."""
    shrink: int = 1
    """Prompts and answers that are so many times shorter, with as much in common."""
    context: int = 0
    """Tokens that a prompt and its answer may have: sessions end before a longer one, and single ones are skipped.
    Default: what the server says."""
    rounds: int = 1
    """Play it so often, each time with other words, so that `compare` knows what chance does."""
    seed: str = ""
    """Of words and random times. Default: another one each time."""

    processes: int = 1
    """Of the client, between which the sessions are shared."""
    slo_ttft: float = 0.0
    """Seconds to the first token that a good request takes at most."""
    slo_itl: float = 0.0
    """Seconds per token after it, in the mean of the answer, likewise."""
    slo_latency: float = 0.0
    """Seconds of the whole answer, likewise."""
    prices: Path | None = None
    """A TOML file with prices, as the gateway's --terms has them. Default: costs that the server tells."""

    def check(self) -> None:
        """Raises LoadError for a value that can't be used."""
        above = {"speed": self.speed, "timeout": self.timeout}
        whole = {"shrink": self.shrink, "rounds": self.rounds, "processes": self.processes}
        others = {
            name: getattr(self, name)
            for name in (*("rate", "limit", "turns", "duration", "max_think", "context", "retries"),)
        } | {"slo_ttft": self.slo_ttft, "slo_itl": self.slo_itl, "slo_latency": self.slo_latency}
        _require(self.vocab > FIRST_ID, "vocab", f"above {FIRST_ID}", self.vocab)
        for name, value in above.items():
            _require(0 < value < math.inf, name, "above 0", value)
        for name, value in whole.items():
            _require(value >= 1, name, "1 or more", value)
        for name, value in others.items():
            _require(0 <= value < math.inf, name, "0 or more", value)

    def target(self) -> LoadTarget:
        """The server. Raises LoadError."""
        host, port, tls, prefix = parsed(self.url)
        return LoadTarget(
            host=host,
            port=port,
            tls=tls,
            prefix=prefix,
            endpoint=self.endpoint,
            model=self.model,
            key=self.api_key,
            session_header=self.session_header,
            ignore_eos=self.ignore_eos,
            tools=self.tools,
            timeout_s=self.timeout,
            retries=self.retries,
            extra=self._extra(),
        )

    def workload(self, trace: Path | None, seed: str) -> Trace:
        """The trace or the mix, shrunk as wanted. Raises LoadError."""
        if (trace is None) == (not self.mix):
            raise LoadError("name a trace, or a mix with --mix turns=5,new=150,output=64, and not both")
        return shrunk(self._read(trace, seed), self.shrink) if self.shrink > 1 else self._read(trace, seed)

    def playing(self, context: int, seed: str) -> Playing:
        """How it is played, on a server that says it has so much context, or 0."""
        return Playing(
            speed=self.speed,
            rate=self.rate,
            limit=self.limit,
            turns=self.turns,
            max_think_s=self.max_think,
            context=self.context or context,
            seed=seed,
        )

    @property
    def slo(self) -> LoadSlo:
        """What makes a request a good one."""
        return LoadSlo(ttft_s=self.slo_ttft, itl_s=self.slo_itl, latency_s=self.slo_latency)

    def config(self, trace: Path | None) -> dict[str, Any]:
        """All of it but the key, for a report."""
        shown = {name: value for name, value in asdict(self).items() if name != "api_key"}
        return {"trace": str(trace) if trace else None, **shown, "prices": str(self.prices) if self.prices else None}

    def _read(self, trace: Path | None, seed: str) -> Trace:
        sessions = self.limit or _SESSIONS
        if trace is None:
            return mixed(parse_mix(self.mix), sessions, seed)
        if trace.suffix == ".toml":
            return mixed(read_mix(trace), sessions, seed)
        try:
            return load_lengths(trace) if trace.name.endswith((".csv", ".csv.gz")) else load(trace)
        except TraceError as error:
            raise LoadError(f"{trace}: {error}") from None

    def _extra(self) -> dict[str, Any]:
        try:
            found = json.loads(self.extra or "{}")
        except ValueError as error:
            raise LoadError(f"--extra must be a JSON object: {error}") from None
        if not isinstance(found, dict):
            raise LoadError(f"--extra must be a JSON object, not {self.extra}")
        return found


def _require(right: bool, name: str, what: str, value: float) -> None:
    if not right:
        raise LoadError(f"--{name.replace('_', '-')} must be {what}, not {value}")

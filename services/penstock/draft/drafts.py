"""One proposer for all streams: loaded once, asked in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.checkpoint import CheckpointError, tokenizer_fingerprint
from penstock.draft.config import DraftConfig
from penstock.engine.hooks import DraftAsk, GrammarAsk
from penstock.engine.speculation.drafting import NgramProposer, Proposer
from penstock.grammar.compiled import Grammars
from penstock.grammar.guide import Endings, Guide
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import DraftMetrics
from penstock.runtime.threads import started_threads


@dataclass(frozen=True)
class Description:
    """The kind of a proposer, and its vocabulary."""

    proposer: str
    tokenizer: str = ""
    vocab_size: int = 0


class Drafts:
    """One proposer and the thread it works in, shared by all streams."""

    def __init__(
        self,
        proposer: Proposer,
        description: Description,
        thread: ThreadPoolExecutor | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars` are those of a proposer that follows them."""
        self._proposer = proposer
        self._grammars = grammars
        self._thread = thread or started_threads(1, "propose")
        self.description = description
        self.metrics = DraftMetrics()

    async def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """At most k tokens for each ask."""
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._thread, self._proposer.propose, asks)
        self.metrics.proposals.inc(len(asks))
        self.metrics.tokens.inc(sum(map(len, answers)))
        return answers

    def guide(self, asked: GrammarAsk) -> Guide | None:
        """The way through a grammar; None while it is being compiled, and when it can't be."""
        if self._grammars is None:
            return None
        return self._grammars.guide_if_ready(asked.text, Endings(asked.ends), asked.prompt)

    def forget(self, id: str) -> None:
        """The sequence is gone; in the proposer's own thread."""
        self._thread.submit(self._proposer.forget, id)

    def close(self) -> None:
        """Waits for the call in progress."""
        self._thread.shutdown()


def load_drafts(config: DraftConfig) -> Drafts:
    """The proposer that the settings name; torch is imported only for a model.

    Raises ConfigError for a directory that is not a model.
    """
    if config.model == "ngram":
        return Drafts(NgramProposer(), Description("ngram"))
    from penstock.engine.config import EngineConfig
    from penstock.engine.forward.model import set_threads
    from penstock.engine.grammars import tokenizer_of
    from penstock.engine.speculation.draft_model import ModelProposer

    set_threads(config.threads)  # this thread loads, and decides how many compute
    try:
        settings = EngineConfig(model=Path(config.model), dtype=config.dtype)
        proposer = ModelProposer(settings, config.max_sequences)
    except CheckpointError as error:
        raise ConfigError("model", config.model, str(error)) from error
    checkpoint = proposer.checkpoint
    description = Description("model", tokenizer_fingerprint(checkpoint), checkpoint.config.vocab_size)
    thread = started_threads(1, "propose")
    thread.submit(set_threads, config.threads)
    return Drafts(proposer, description, thread, Grammars(partial(tokenizer_of, checkpoint)))

"""What the texts of an engine's requests keep to: their grammars, and words that must not be there."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from penstock.checkpoint import Checkpoint
from penstock.engine.bans import RequestBans
from penstock.engine.checks import check_sampling
from penstock.engine.errors import EngineBusy, GrammarFailed
from penstock.engine.request import SamplingParams
from penstock.engine.rules import FREE, TextRules
from penstock.grammar.compiled import Grammars, GrammarsBusy
from penstock.grammar.guide import Endings, Guide
from penstock.grammar.tokenizer import GrammarTokenizer


def tokenizer_of(checkpoint: Checkpoint) -> GrammarTokenizer:
    """The model's tokens, as grammars see them."""
    return GrammarTokenizer.read(checkpoint.tokenizer, checkpoint.config.vocab_size, checkpoint.eos_token_ids)


class ModelTokens:
    """Reads a model's tokens once, when they are first wanted. Any thread may call it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reading = Lock()
        self._read: GrammarTokenizer | None = None

    def __call__(self) -> GrammarTokenizer:
        """The tokens. Raises ValueError or OSError when they can't be read."""
        with self._reading:
            if self._read is None:
                self._read = tokenizer_of(self._checkpoint)
            return self._read


class RequestGrammars:
    """Compiles requests' grammars for one model. Belongs to one event loop, which it never holds."""

    def __init__(self, checkpoint: Checkpoint, load: Callable[[], GrammarTokenizer], drafting: bool) -> None:
        """`load` reads the model's tokens, in a thread, before the first grammar. `drafting`: whether forced tokens are
        wanted, as drafts."""
        self._drafting = drafting
        self._eos = checkpoint.eos_token_ids
        self._grammars = Grammars(load)

    async def of(self, sampling: SamplingParams, prompt: int) -> Guide:
        """The way through its grammar of a request with a prompt of `prompt` tokens, before its first token of output:
        `Request.output` is followed by the step that needs it. Raises GrammarFailed or EngineBusy."""
        endings = Endings(sampling.stop_token_ids | self._eos, not sampling.ignore_eos, sampling.min_tokens)
        try:
            guide = await self._grammars.guide(sampling.grammar, endings, prompt)
        except GrammarsBusy as error:
            raise EngineBusy(str(error)) from error
        except (ValueError, OSError) as error:  # a broken grammar, or a tokenizer that llguidance can't read
            raise GrammarFailed(error) from error
        guide.leads = self._drafting
        return guide


class RequestRules:
    """Makes the rules of requests, for one model. Belongs to one event loop, which it never holds."""

    def __init__(self, checkpoint: Checkpoint, drafting: bool) -> None:
        """`drafting`: whether tokens that a grammar forces are wanted, as drafts."""
        tokens = ModelTokens(checkpoint)
        self._grammars = RequestGrammars(checkpoint, tokens, drafting)
        self._bans = RequestBans(tokens)
        self._vocab_size = checkpoint.config.vocab_size

    async def of(self, sampling: SamplingParams, prompt: int) -> TextRules:
        """The rules of a request with a prompt of `prompt` tokens, before its first token of output. Raises
        RequestRefused or EngineBusy."""
        if not (sampling.grammar or sampling.bad_words):
            return FREE
        check_sampling(sampling, self._vocab_size)
        guide = await self._grammars.of(sampling, prompt) if sampling.grammar else None
        words = await self._bans.of(sampling) if sampling.bad_words else None
        return TextRules(guide, words)

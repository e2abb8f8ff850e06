"""The grammars of an engine's requests."""

from __future__ import annotations

from functools import partial

from penstock.checkpoint import Checkpoint
from penstock.engine.errors import EngineBusy, GrammarFailed
from penstock.engine.request import Request
from penstock.grammar.compiled import Grammars, GrammarsBusy
from penstock.grammar.guide import Endings, Guide
from penstock.grammar.tokenizer import GrammarTokenizer


def tokenizer_of(checkpoint: Checkpoint) -> GrammarTokenizer:
    """The model's tokens, as grammars see them."""
    return GrammarTokenizer.read(checkpoint.tokenizer, checkpoint.config.vocab_size, checkpoint.eos_token_ids)


class RequestGrammars:
    """Compiles requests' grammars for one model. Belongs to one event loop, which it never holds."""

    def __init__(self, checkpoint: Checkpoint, drafting: bool) -> None:
        """`drafting`: whether forced tokens are wanted, as drafts."""
        self._drafting = drafting
        self._eos = checkpoint.eos_token_ids
        self._grammars = Grammars(partial(tokenizer_of, checkpoint))

    async def of(self, request: Request) -> Guide:
        """The request's way through its grammar, before its first token of output: `Request.output` is followed by the
        step that needs it. Raises GrammarFailed or EngineBusy."""
        sampling = request.sampling
        endings = Endings(sampling.stop_token_ids | self._eos, not sampling.ignore_eos, sampling.min_tokens)
        try:
            guide = await self._grammars.guide(sampling.grammar, endings, len(request.prompt))
        except GrammarsBusy as error:
            raise EngineBusy(str(error)) from error
        except (ValueError, OSError) as error:  # a broken grammar, or a tokenizer that llguidance can't read
            raise GrammarFailed(error) from error
        guide.leads = self._drafting
        return guide

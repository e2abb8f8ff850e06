"""One request while the engine has it: its tokens, its pages, and how far they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.request import FinishReason, Request
from penstock.engine.rules import FREE, TextRules
from penstock.engine.sampling.choice import Choice, Chosen
from penstock.engine.scheduling.leftover import RESUMED_FROM, YIELDS_FROM
from penstock.engine.step.run import Run

if TYPE_CHECKING:
    from penstock.engine.layers.adapters import AdapterWeights
    from penstock.engine.step.pictures import PictureRows
    from penstock.grammar.guide import Guide
    from penstock.kv.identity import Chain


@dataclass(frozen=True, slots=True)
class Standstill:
    """Why a sequence could not go on behind blocks that are there, but of which some have no near part."""

    first: int
    """Where it stood: what lies before was enough for it."""
    end: int
    """The block that is not there."""
    gaps: Sequence[int]
    """As of `Reach.gaps`."""


@dataclass(eq=False, slots=True, kw_only=True)
class Live:
    """State of one request. The scheduler owns it and changes it between steps; a step only reads it."""

    request: Request
    id: str
    """The id of the request."""
    ticket: int
    """Order of arrival, unique in the engine."""
    place: int
    """In line. That of its arrival, unless others of the same owner have exchanged theirs with it; behind all others
    when it yields, and before them, below 0, when it is resumed."""
    rank: float
    """When it came, in seconds, and its priority: those of one owner have their places in this order."""
    owner: str
    """Its name in the page pool."""
    stops: frozenset[int]
    """Tokens that end the sequence."""
    tokens: list[int]
    """Prompt and output. Only ever grows."""
    given: int
    """How many of them came with the request."""
    ends_at: int
    """Tokens with which `max_tokens` is used up."""
    run: Run
    """Its tokens in a step, chosen again by `aim` before each step. Refers to the lists `tokens` and `pages`."""
    guide: Guide | None
    """Its way through its grammar. Belongs to the step while one is computed."""
    pages: list[int]
    chain: Chain | None = None
    """Names its blocks; None: they are its own, and it uses nobody else's."""
    named: int = 0
    """Leading blocks whose pages have their keys, so that nobody writes to them."""
    standstill: Standstill | None = None
    """Holds until one of its blocks comes: see Sharing."""
    version: int = 0
    """Changes whenever `pages` changes."""
    computed: int = 0
    """Leading tokens whose KV is in `pages`."""
    loaded: int = 0
    """Leading given tokens that a source provided and that were used."""
    loaded_blocks: int = 0
    """Leading blocks that a source provided and that no sink needs."""
    reached: int = 0
    """The most given tokens that were ever computed, loaded or shared."""
    cached_tokens: int = 0
    """Given tokens that the source calls cached."""
    shared_tokens: int = 0
    """Given tokens whose KV another sequence had left in this engine's pages when they were to be computed."""
    computed_tokens: int = 0
    """Given tokens that steps computed, those computed again after a preemption counted once."""
    stripped: bool = False
    """Its loaded pages were taken away."""
    preemptions: int = 0
    busy: bool = False
    """A step is reading its tokens and pages."""
    set_back: Callable[[], None] = lambda: None
    """Called when it goes back to the line without its pages."""
    gone: bool = False
    """Finished, failed or dropped: it takes part in no further step."""

    @property
    def length(self) -> int:
        """All known tokens."""
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not there yet; 1 is a decode step."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Output tokens, those of `Request.output` included."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def draftable(self) -> int:
        """Most drafts that its next step can use: its last token is sampled, not drafted."""
        if not self.request.sampling.drafts:
            return 0
        return max(0, self.request.sampling.max_tokens - self.generated - 1)

    @property
    def next_key(self) -> bytes | None:
        """The key of the block that its next token belongs to, as far as it is known."""
        if self.chain is None:
            return None
        block = self.computed // self.chain.block_size
        return self.chain.keys[block] if block < len(self.chain.keys) else None

    @property
    def pictures(self) -> PictureRows | None:
        """Of the request."""
        return self.run.pictures

    def lacks(self, sight: int) -> bool:
        """Whether embeddings of pictures among its next `sight` tokens are not there yet."""
        return self.pictures is not None and self.pictures.missing(self.computed, self.computed + sight) is not None

    def visible(self, start: int) -> int:
        """As in Schedulable."""
        return len(self.tokens) if self.pictures is None else self.pictures.visible(start)

    def pages_changed(self) -> None:
        """Renames the block table, under whose name others cache it. Call this after every change of `pages`."""
        self.version += 1
        self.run.table = (self.owner, self.version)

    def use_loaded(self, valid: int, cached: int | None, block_size: int) -> None:
        """Takes over the loaded pages of the first `valid` tokens, of which `cached` are reported as cached; None
        reports those that are used. The last token is always computed, for its logits."""
        self.loaded_blocks = valid // block_size
        self.computed = min(valid, self.length - 1)
        self.loaded = self.reached = min(self.computed, self.given)
        self.cached_tokens = self.loaded if cached is None else min(cached, self.given)

    def forget_loaded(self) -> None:
        """Forgets loaded pages that were taken away before their use; later writes of the source do not count."""
        self.loaded = self.reached = self.cached_tokens = 0
        self.stripped = True

    def advance(self, answer: list[Chosen]) -> FinishReason | None:
        """Appends the tokens of a computed step and returns why the sequence has ended, or None. Removes tokens behind
        the end from `answer`."""
        run, tokens, finish = self.run, self.tokens, None
        before = len(tokens)
        for chosen in answer:
            token = chosen.token
            tokens.append(token)
            if token in self.stops or len(tokens) >= self.ends_at:
                finish = self.verdict()
                if finish is not None:
                    del answer[len(tokens) - before :]
                    break
        known = run.start + run.known
        self.computed = known + len(answer) - 1 if answer else known
        if self.reached < self.given:
            start, reached = min(run.start, self.given), min(known, self.given)
            self.shared_tokens += max(0, start - self.reached)
            self.computed_tokens += max(0, reached - max(start, self.reached))
            self.reached = max(self.reached, reached)
        return finish

    def verdict(self) -> FinishReason | None:
        """Why its last token ends the sequence; None when it does not."""
        if self.generated == 0:
            return None
        if self.tokens[-1] in self.stops and (self.guide or self.generated > self.request.sampling.min_tokens):
            return "stop"
        return "length" if self.length >= self.ends_at else None


def new_live(
    request: Request,
    ticket: int,
    eos: frozenset[int],
    rules: TextRules = FREE,
    chain: Chain | None = None,
    *,
    now: float = 0.0,
    adapter: AdapterWeights | None = None,
    pictures: PictureRows | None = None,
) -> Live:
    """A sequence at the start of its life, `now`; `eos` are the model's end tokens, `chain` names its blocks, `adapter`
    and `pictures` are those of the request."""
    sampling, tokens, guide = request.sampling, [*request.prompt, *request.output], rules.guide
    stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos) if guide is None else guide.ends
    pages: list[int] = []
    owner = f"{request.id}#{ticket}"
    choice = Choice(sampling, stops, tokens, len(request.prompt), guide=guide, words=rules.words)
    run = Run(choice, 0, 0, pages, (owner, 0), chain is not None, adapter=adapter, pictures=pictures)
    return Live(
        request=request,
        id=request.id,
        ticket=ticket,
        place=ticket + (YIELDS_FROM if request.yields else RESUMED_FROM if request.resumed else 0),
        rank=now + request.priority,
        owner=owner,
        stops=stops,
        tokens=tokens,
        given=len(tokens),
        ends_at=len(request.prompt) + sampling.max_tokens,
        run=run,
        guide=guide,
        pages=pages,
        chain=chain,
    )

"""Guesses of a head, for the texts of one step at a time. Synchronous; in the thread that computes steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.engine.sampling.choice import Choice
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.speculation.guess import Guess
from penstock.engine.speculation.head.model import HeadContext, HeadModel, HeadRows
from penstock.engine.speculation.head.watched import WatchedStates
from penstock.grammar.guide import Guide
from penstock.grammar.masks import MaskAsk, MaskMaker
from penstock.grammar.tokenizer import MaskWords

_HOPELESS = 0.2
"""A guess goes no further once all of it is right with a chance below this."""


@dataclass(eq=False, slots=True)
class HeadView(WatchedStates):
    """What a head has of one text: features that it has not used yet, and its own rows."""

    context: HeadContext = field(default_factory=HeadContext)
    """Up to `real` its rows have the target's features; guesses follow."""

    def watch(self, begin: int, features: Tensor) -> None:
        """As WatchedStates; where it begins anew, the rows are of no more use."""
        if len(features) and begin != self.end:
            self.context.restart(begin)
        WatchedStates.watch(self, begin, features)

    def rows(self) -> tuple[int, Tensor]:
        """(position of the first, the features) of the rows to compute next. None of them waits any more."""
        goes_on = self.waiting[0][0] == self.real > self.context.begin
        if goes_on:
            features = torch.cat([piece for _, piece in self.waiting])
            begin, self.real = self.real, self.end
            self.waiting.clear()
            self.context.cut(begin)
        else:
            begin, features = self.take()
            self.context.restart(begin)
        return begin, features


@dataclass(slots=True)
class HeadAsk:
    """Asks for up to `count` tokens behind `tokens`, of which all but the last have been watched."""

    watched: HeadView
    tokens: Sequence[int]
    """Shared; the call changes nothing, and nobody changes it meanwhile."""
    count: int
    choice: Choice
    """How the target chooses what follows `tokens`."""


@dataclass(slots=True)
class _Text:
    """A text while it is guessed on."""

    ask: HeadAsk
    guide: Guide | None
    text: list[int]
    """With the guesses; only of a guided one."""
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: float = 1.0
    over: bool = False

    @property
    def wants(self) -> bool:
        return not self.over and len(self.tokens) < self.ask.count and self.reach >= _HOPELESS

    def choice(self, legal: MaskWords | None) -> Choice:
        """Of the next guess."""
        own = self.ask.choice
        given = (own.params, own.stops, own.tokens, own.prompt_length)
        return Choice(*given, tuple(self.tokens), own.state, guide=own.guide, legal=legal, words=own.words)

    def take(self, token: int, chance: float) -> None:
        self.tokens.append(token)
        self.text.append(token)
        self.chances.append(chance)
        self.reach *= chance
        self.over = token in self.ask.choice.stops


class HeadGuesser:
    """Draws guesses with the target's own noise and in its own way (see `sampling`), as far as the head knows the
    tokens."""

    def __init__(self, model: HeadModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._sampler = Sampler(model.head.vocab_size, device)
        self._masks = MaskMaker(1)
        self._able = set(model.known.tolist())
        self.rows = self.steps = 0
        """Rows that the last call has computed, in so many steps."""

    @torch.inference_mode()
    def guess(self, asks: Sequence[HeadAsk]) -> list[Guess]:
        """A guess for each ask; the chances are the head's own."""
        self.rows = self.steps = 0
        texts = [_begun(ask) for ask in asks]
        parts, states = [], []
        for ask in asks:
            begin, features = ask.watched.rows()
            states.append(self._model.fuse(features))
            parts.append(HeadRows(ask.watched.context, ask.tokens[begin + 1 : begin + 1 + len(features)]))
        last, at = [], -1
        for part in parts:
            at += len(part.ids)
            last.append(at)
        state = self._forward(torch.cat(states), parts)[last]
        active = list(range(len(texts)))
        while active:
            self._draw(state, [texts[number] for number in active])
            going = [place for place, number in enumerate(active) if texts[number].wants]
            active = [active[place] for place in going]
            if active:
                rows = [HeadRows(texts[one].ask.watched.context, texts[one].tokens[-1:]) for one in active]
                state = self._forward(state[going], rows)
        return [Guess(tuple(text.tokens), tuple(text.chances)) for text in texts]

    def _forward(self, state: Tensor, parts: list[HeadRows]) -> Tensor:
        self.rows += len(state)
        self.steps += 1
        return self._model.forward(state, parts)

    def _draw(self, state: Tensor, texts: Sequence[_Text]) -> None:
        """Adds a token to each text, or ends it; one whose numbers are not finite ends, and disturbs no other."""
        logits = self._model.logits(state)
        sound = logits.isfinite().all(-1)
        for text, finite in zip(texts, sound.tolist(), strict=True):
            text.over = text.over or not finite
        wide = self._model.spread(logits.masked_fill_(~sound.unsqueeze(-1), 0.0))
        legal = [self._legal(text) for text in texts]
        chosen = self._sampler.sample(wide, [text.choice(mask) for text, mask in zip(texts, legal, strict=True)])
        for row, mask in zip(wide, legal, strict=True):
            if mask is not None:
                row.masked_fill_(~self._allowed(mask), float("-inf"))
        shares = wide.softmax(-1)
        for number, (text, one) in enumerate(zip(texts, chosen, strict=True)):
            share = float(shares[number, one.token])
            if text.over or one.token not in self._able or not share > 0:  # nor a number: it can guess nothing legal
                text.over = True
            else:
                text.take(one.token, share)

    def _allowed(self, mask: MaskWords) -> Tensor:
        """bool [vocabulary]."""
        bits = np.unpackbits(mask.view(np.uint8), count=self._model.head.vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_)).to(self._device)

    def _legal(self, text: _Text) -> MaskWords | None:
        """What the text's grammar allows next; None: it has none. Ends a text that has left it."""
        if text.guide is None:
            return None
        masks = self._masks.masks([MaskAsk(text.guide, text.text)])
        if masks.failed:
            text.over = True
        legal: MaskWords = masks.rows[0]
        return legal


def _begun(ask: HeadAsk) -> _Text:
    guide = ask.choice.guide
    if guide is None:
        return _Text(ask, None, [])
    guide = guide.copy()
    guide.leads = False
    return _Text(ask, guide, list(ask.tokens))

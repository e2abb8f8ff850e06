"""Phrasings in more ways than anybody writes down: what a model has read in few ways it does not know in another.

Only training varies them. Evaluation keeps to the lists, to those that training never sees.
"""

from __future__ import annotations

from random import Random

from .words import Side, words

_LEADS = (
    "Hey, ", "Now, ", "So, ", "And now: ", "Listen: ", "Quick question: ", "One thing: ", "One more: ", "Question: ",
    "Then ", "First, ", "Alright, ", "Well, ", "Right, ", "Sure, ", "Fine, ", "Again, ", "By the way, ", "As said, ",
    "Task: ", "Todo: ", "Request: ", "Urgent: ", "Good day, ", "Excuse me, ", "Sorry, ", "Yes, ", "No, ", "Hm, ",
    "For later: ", "Before I forget: ", "When you can: ", "My turn: ", "I ask you: ", "Let me ask: ", "Be so kind: ",
)  # fmt: skip
_TAILS = (
    " now", " today", " for me", " right away", " at once", " if you can", " if possible", " as soon as you can",
    " this time", " again", " for my boss", " for the team", " quickly", " when you have time", ", ok?", ", thanks",
    ", will you?", ", okay", " before lunch", ", it is urgent", ", I need it", ", as always", " and tell me",
)  # fmt: skip
_FILLERS = (
    "just", "kindly", "quickly", "actually", "maybe", "simply", "really", "then", "also", "once", "again", "still",
    "perhaps", "first", "soon", "only", "even", "rather", "somehow", "finally", "directly", "indeed", "already", "too",
)  # fmt: skip
_LIGHT = frozenset(
    words(
        """a an and any are at can could do does for from get give have how i i'd in is it let like me my need of on
        one our please so tell the this to up us want we what what's which will with would you your"""
    )
)
_BETWEEN = ("in", "at", "for", "of", "on", "to", "from", "with", "by", "about", "near", "into", "over", "around", "as")
_JOINTS = (
    " by {e}", " via {e}", " having {e}", " including {e}", " along with {e}", " together with {e}", " plus {e}",
    " through {e}", " under {e}", " when {e}", " if {e}", " while {e}", " on {e}", " at {e}", " as {e}", " in {e}",
    " setting {e}", " passing {e}", " choosing {e}", " putting {e}", " specifying {e}", " applying {e}", " giving {e}",
    " based on {e}", " according to {e}", " considering {e}", " regarding {e}", " provided {e}", " assuming {e}",
    "; {e}", " - {e}", " ({e})", ": {e}", " and {e}", " but {e}", " so {e}", " like {e}", " per {e}", " until {e}",
    " whose {e}", " having set {e}", " that has {e}", " which has {e}", " of {e}", " from {e}", " whereby {e}",
    " keeping {e}", " making {e}", " adding {e}", " picking {e}", " needing {e}", " showing {e}", " holding {e}",
)  # fmt: skip
_VARIED = 0.4
"""How often a phrasing is varied, and how often clauses are joined in one of many ways."""


def varied(rng: Random, side: Side, form: str) -> str:
    """A phrasing, its slots in braces, with a light word left out, put in or exchanged, or two parts swapped."""
    if side.evaluation or rng.random() > _VARIED:
        return form
    parts = form.split(" ")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(parts))
        part, draw = parts[at], rng.random()
        if draw < 0.35 and part.lower() in _LIGHT and len(parts) > 2:
            if part in _BETWEEN and rng.random() < 0.6:
                parts[at] = rng.choice(_BETWEEN)
            else:
                del parts[at]
        elif draw < 0.75:
            if at and "{" not in parts[at - 1] + part:
                parts.insert(at, rng.choice(_FILLERS) if rng.random() < 0.8 else side.pseudo(rng))
        else:
            _swap(rng, parts)
    text = " ".join(parts)
    return text[:1].upper() + text[1:] if rng.random() < 0.8 else text[:1].lower() + text[1:]


def _swap(rng: Random, parts: list[str]) -> None:
    """Exchanges two clauses such as `at {time}` and `on {date}`, where there are two; the marks behind them stay."""
    starts = [i for i in range(1, len(parts) - 1) if parts[i] in _BETWEEN and parts[i + 1].startswith("{")]
    if len(starts) < 2:
        return
    first, second = sorted(rng.sample(starts, 2))
    (one, _, behind_one), (other, _, behind_other) = (parts[i + 1].partition("}") for i in (first, second))
    parts[first], parts[second] = parts[second], parts[first]
    parts[first + 1], parts[second + 1] = other + "}" + behind_one, one + "}" + behind_other


def joint(rng: Random, side: Side, usual: str) -> str:
    """How a clause, `{e}`, is joined to a request: as `usual`, or in one of many ways."""
    if side.evaluation or rng.random() > _VARIED:
        return usual
    if rng.random() < 0.15:
        return f" {side.pseudo(rng)} {{e}}"
    return rng.choice(_JOINTS)


def addressed(rng: Random, side: Side, text: str) -> str:
    """A request with something before or behind it."""
    if side.evaluation or rng.random() > _VARIED / 2:
        return text
    if rng.random() < 0.6:
        lead = rng.choice(_LEADS) if rng.random() < 0.85 else f"Hey {side.proper(rng)}, "
        return lead + (text if rng.random() < 0.4 else text[:1].lower() + text[1:])
    end = text[-1:] if text[-1:] in ".?" else ""
    return text[: len(text) - len(end)] + rng.choice(_TAILS) + end

"""The section about drafts."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.bench.measured.results import Line, Results, figures, table

_TOKENS = "tokens_per_step_"
_KNOWN = {"_prompt": "its own text", "_session": "and its session's", "": "and its tenant's outputs"}
_MESH = (
    Line("speedup_tool_calls_bound", "tool calls, all proposers, bound pair"),
    Line("speedup_tool_calls_embedded", "tool calls, all proposers, embedded pair"),
    Line("speedup_json_bound", "JSON of a schema, all proposers, bound pair"),
    Line("speedup_json_embedded", "JSON of a schema, all proposers, embedded pair"),
    Line("speedup_forced", "tool calls, what the grammar forces alone, bound pair"),
    Line("speedup_quote", "answers that quote, lookup, bound pair"),
    Line("speedup_text", "free text, all proposers, bound pair"),
    Line("worst_ratio", "the worst of all workloads and batches, all proposers"),
    Line("worst_ratio_again", "the same of a mesh that has no drafts at all: what the run can't tell"),
)
_TREES = {"one": "16 drafts in one branch", "same_rows": "12 and 4 in two", "more_rows": "16 and 16 in two"}
_FORMS = ("plain", "grammar", "lookup", "all")
_PLACES = ("worker", "service")
_LINK = (
    Line("worst_ratio_delay", "the worst of all delays"),
    Line("break_even_ms", "the longest delay at which drafts still pay, ms", 0),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    parts = (
        (_trees, "trees_"),
        (_rows, "rows_"),
        (_mesh, "speedup_"),
        (_heads, "head_"),
        (_branches, "branch_"),
        (_link, "worst_ratio_delay"),
        (_peers, "tool_calls_vs_"),
    )
    text = _replay(now, earlier) + "".join(part(now) + now.elsewhere(begin) for part, begin in parts)
    return f"## What drafts are worth\n{text}\nMeasured on {now.machine}.{other}\n"


def _replay(now: Results, earlier: Results | None) -> str:
    names = [id.removeprefix(_TOKENS).removesuffix("_prompt") for id in now.ids() if id.endswith("_prompt")]
    traces = [*dict.fromkeys(name for name in names if now.has(f"{_TOKENS}{name}"))]
    if not traces:
        return ""
    lines = [Line(f"{_TOKENS}{name}", f"tokens of a verify step, guesses by lookup, {name}") for name in traces]
    columns = ("tokens_per_step", "drafted_per_step", "accepted_share", "lookup_us")
    rows = [
        [f"{name}, {_KNOWN[end]}", *(now.number(f"{column}_{name}{end}") for column in columns)]
        for name in traces
        for end in _KNOWN
    ]
    return f"""
`penstock bench speculation`: recorded sessions of agents, decoded greedily. What was recorded is what the model says; a
step keeps the longest right beginning of a guess, and one token more. Tokens are those of the embedded model, which has
4,096 of them. The chances of guesses were fitted to the same recordings.

{figures(lines, now, earlier)}

{table(["trace, and what guesses are made from", "tokens", "drafted", "of these right", "lookup, us a step"], rows)}
"""


def _trees(now: Results) -> str:
    traces = [id.removeprefix("trees_one_") for id in now.ids() if id.startswith("trees_one_")]
    if not traces:
        return ""
    rows = [[trace, *(now.number(f"trees_{words}_{trace}") for words in _TREES)] for trace in traces]
    return f"""
The same of the first turns of a trace, with a second branch that begins with the likeliest other token, in tokens of a
verify step:

{table(["trace", *_TREES.values()], rows)}
"""


def _rows(now: Results) -> str:
    pairs = [id.removeprefix("rows_rate_") for id in now.ids() if id.startswith("rows_rate_")]
    if not pairs:
        return ""
    counts = [id.split("_")[2] for id in now.ids() if id.startswith("rows_gain_") and id.endswith(pairs[0])]
    rows = [
        [f"{pair}, {words}", *(now.number(f"rows_{what}_{count}_{pair}") for count in counts)]
        for pair in pairs
        for what, words in (("step", "seconds of a step"), ("gain", "tokens/s"))
    ]
    return f"""
What it costs to verify drafts, and so what they can bring at most: steps of the bare engine whose drafts come for
nothing and are all right, : steps without any. No proposer brings more, and those that are wrong now and then less:

{table(["target, drafts of a step", *counts], rows)}
"""


def _mesh(now: Results) -> str:
    if not now.has("worst_ratio"):
        return ""
    heads = ["workload, streams if several, pair", "without, tokens/s", "no drafts at all", *_FORMS[1:]]
    heads.append("accepted for each token")
    return f"""
Tokens/s between the first and the last token of answers, with drafts : without. A mesh gets each request twice, as it
is and with `"penstock": {{"drafts": false}}`, in turns. *Grammar* is a mesh that drafts what a grammar forces alone,
*lookup* also what is looked up, *all* also has a draft service on the same cores; a mesh that has *no drafts at all*
answers both alike, so its ratio is what the run can't tell. The embedded pair is what `penstock up` serves; the bound
pair says the same tokens, with as many weights to read as models of 135 and 15 million parameters.

{figures(_MESH, now)}

{table(heads, [*_cells(now)])}
"""


def _cells(now: Results) -> Iterator[list[str]]:
    for id in now.ids():
        cell = id.removeprefix("plain_all_")
        if cell != id:
            ratios = [now.number(f"ratio_{form}_{cell}") for form in _FORMS]
            yield [cell.replace("_", " "), now.rate(id), *ratios, now.number(f"accepted_all_{cell}")]


def _heads(now: Results) -> str:
    if not now.has("head_state_bytes_per_token"):
        return ""
    cells = [id.removeprefix("head_plain_worker_") for id in now.ids() if id.startswith("head_plain_worker_")]
    rows = [
        [
            cell.replace("_", " "),
            now.rate(f"head_plain_worker_{cell}"),
            *(now.number(f"head_{what}_{place}_{cell}") for place in _PLACES for what in ("ratio", "accepted")),
        ]
        for cell in cells
    ]
    heads = ["workload, streams if several", "without, tokens/s"]
    heads += [f"{place}, {what}" for place in _PLACES for what in ("ratio", "accepted for each token")]
    return f"""
A draft head for the embedded model, in the decode workers and in the draft service, where the states of each token that
it looks at are {now.number("head_state_bytes_per_token", 0)} bytes on their way; tokens/s with it : without drafts:

{table(heads, rows)}
"""


def _branches(now: Results) -> str:
    cells = [id.removeprefix("branch_gain_") for id in now.ids() if id.startswith("branch_gain_")]
    if not cells:
        return ""
    parts = ("rejections", "branch_ready", "branch_gain")
    rows = [[cell.replace("_", " "), *(now.number(f"{part}_{cell}") for part in parts)] for cell in cells]
    heads = [
        "texts, and drafts of a pass",
        "passes with a wrong draft",
        "of these a branch would be right",
        "tokens a step, at most",
    ]
    return f"""
What a draft could bring that goes on from its second choice too, where it is least sure: how often that would be right
behind a wrong draft, and by how much it would raise the tokens of a step at most, if it were free. A second row makes a
step of the embedded draft {now.number("second_row", 1)} times as long ({now.span("second_row", 1)}).

{table(heads, rows)}
"""


def _link(now: Results) -> str:
    if not now.has("worst_ratio_delay"):
        return ""
    cells = [id.removeprefix("ratio_delay_").split("_") for id in now.ids() if id.startswith("ratio_delay_")]
    chances, delays = dict.fromkeys(chance for chance, _ in cells), dict.fromkeys(delay for _, delay in cells)
    rows = [
        [f"{chance} % right", *(now.number(f"ratio_delay_{chance}_{delay}") for delay in delays)] for chance in chances
    ]
    rows += [
        [f"{chance} % right, accepted for each token", *(now.number(f"accepted_delay_{chance}_{d}") for d in delays)]
        for chance in chances
    ]
    return f"""
A draft service that knows what the embedded model will say, and is right as often as it is told to be, behind a link
that takes so much longer both ways together; tokens/s of one stream, with it : without:

{figures(_LINK, now)}

{table(["drafts", *delays], rows)}
"""


def _peers(now: Results) -> str:
    if not now.has("tool_calls_vs_best_peer"):
        return ""
    peers = [id.removeprefix("rate_tool_calls_") for id in now.ids() if id.startswith("rate_tool_calls_")]
    rows = [
        [
            peer,
            now.rate(f"rate_tool_calls_{peer}"),
            "" if peer == "mesh" else now.number(f"tool_calls_vs_{peer}"),
        ]
        for peer in peers
    ]
    best = now.against("tool_calls_vs_best_peer")
    return f"""
The demo's tool calls by the bound pair's target, one at a time, without a grammar: the mesh with all proposers beside
servers that speculate with the pair's draft or by lookup, on the same weights. *Best* is the one beside which the mesh
looks worst, here {best}. No request comes twice, but many are alike, which a lookup in earlier answers makes use of.

{figures([Line("tool_calls_vs_best_peer", "tokens/s, ours : the best peer's")], now)}

{table(["server, and how it speculates", "tokens/s", "ours : its"], rows)}
"""

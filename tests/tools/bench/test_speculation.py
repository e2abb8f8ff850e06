"""`penstock bench speculation` over the texts of the repository, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.bench.measured.document import section
from penstock.bench.speculation.bound import bound
from penstock.bench.speculation.branches import DraftChoices, Outcomes, SaidText, TwoChoices, outcomes
from penstock.bench.speculation.heads import head_figures
from penstock.bench.speculation.measure import measure
from penstock.bench.speculation.replay import EXCERPT, RecordedTurn, recorded_turns, replay
from penstock.bench.speculation.rows import row_figures
from penstock.bench.speculation.trees import tokens_per_step
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.engine.speculation.lookup.native import corpora
from penstock.models import embedded
from penstock.runtime.config import ConfigError
from penstock.traces.excerpt import excerpt
from penstock.traces.reading import TraceError, texts

ROOT = Path(__file__).parents[3]


async def test_who_knows_more_guesses_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = await measure(False, ["replay"])
    found = {one.id: one.value for one in report.figures}
    alone, session, tenant = (found[f"tokens_per_step_agents{end}"] for end in ("_prompt", "_session", ""))
    assert alone is not None and session is not None and tenant is not None
    assert 1.5 < alone < session < tenant
    for name in ("agents_prompt", "agents_session", "agents"):
        accepted = (found[f"tokens_per_step_{name}"] or 0) - 1
        assert accepted == pytest.approx(
            (found[f"drafted_per_step_{name}"] or 0) * (found[f"accepted_share_{name}"] or 0)
        )
    text = section(report.json())
    assert f"| agents, its own text | {alone:.2f} |" in text and "n/a" not in text


def test_outcomes_of_leads() -> None:
    def choices(*texts: str) -> list[TwoChoices]:
        """Of "ab3": first choice a, second b, surer by 3."""
        return [TwoChoices(ord(text[0]), ord(text[1]), float(text[2])) for text in texts]

    def found(came: str, depth: int, *texts: str) -> Outcomes:
        return outcomes(choices(*texts), [ord(letter) for letter in came], depth)

    right = ("ax5", "bx5", "cx5", "dx5", "ex5", "fx5")
    assert found("abcdef", 2, *right) == Outcomes(tokens=6, passes=2), "with a token of the target behind each"
    assert found("abcdef", 8, *right) == Outcomes(tokens=6, passes=1)
    wrong = ("ax5", "bx5", "xc1", "dx5", "ex5", "fx5")
    assert found("abcdef", 8, *wrong) == Outcomes(tokens=6, passes=2, rejections=1, second_right=1, ready=1)
    surer = ("ax5", "bx0", "xc1", "dx5", "ex5", "fx5")
    assert found("abcdef", 8, *surer) == Outcomes(tokens=6, passes=2, rejections=1, second_right=1, ready=0)
    other = ("ax5", "bx5", "xy1", "dx5", "ex5", "xf1")
    both = found("abcdef", 8, *other)
    assert both == Outcomes(tokens=6, passes=2, rejections=2, second_right=1, ready=1)
    assert both.gain == pytest.approx((7 / 3) / (8 / 4)), "four steps, of which one would not verify nothing"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_choices_of_a_draft_are_those_it_would_draw(temperature: float) -> None:
    """The first is what an engine with the draft's weights says there."""
    prompt = tuple(range(100, 700))
    sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=5, ignore_eos=True)
    async with Engine.open(EngineConfig(model=embedded("penstock-mini-draft"), kv_pool_tokens=2048)) as engine:
        said = []
        async for update in engine.generate(Request(id="1", prompt=prompt, sampling=sampling)):
            said += [token.token for token in update.tokens]
    choices = DraftChoices().of(SaidText(prompt, said, temperature, 5))
    assert [one.first for one in choices] == said
    assert all(one.first != one.second and one.margin >= 0 for one in choices)


async def test_what_was_asked_for_is_replayed_and_goals_have_their_traces(tmp_path: Path) -> None:
    names = ("a_miniswe", "a_taubench", "a_other")
    for name in names:
        excerpt(ROOT / EXCERPT, tmp_path / f"{name}.jsonl.gz", first=9, texts=True)
    report = await measure(True, ["replay"], [tmp_path / f"{name}.jsonl.gz" for name in names])
    goals = {one.id: one.goal for one in report.figures if one.goal is not None}
    assert goals == {"tokens_per_step_miniswe": 4.0, "tokens_per_step_taubench": 2.3}


def test_a_step_keeps_what_is_right_and_one_token_more() -> None:
    """The prompt has all of it. After a token without a guess, and a guess that rests on one token, guesses are as long
    as they may be; the last token needs none."""
    poem = tuple(range(100, 151))
    tally = replay([RecordedTurn(b"s", poem, poem)], corpora(), "_prompt")
    assert (tally.steps, tally.tokens, tally.drafted, tally.accepted) == (5, 51, 3 + 16 + 16 + 11, 46)


def test_a_second_branch_is_right_where_the_first_is_wrong() -> None:
    """After `9 9` came `1 2 3` twice and `4 5 6` once; now `4 5 6` comes, and something new."""
    said = (20, 9, 9, 1, 2, 3, 21, 9, 9, 4, 5, 6, 22, 9, 9, 1, 2, 3, 23, 9, 9)
    turns = [RecordedTurn(b"s", said, (4, 5, 6, 50))]
    assert tokens_per_step(turns, 16, 0) < tokens_per_step(turns, 12, 4) == 4.0


async def test_trees_over_recorded_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = await measure(True, ["trees"])
    one, same, more = (figure.value or 0.0 for figure in report.figures)
    assert 1.0 < one < more and same < more
    assert f"| agents | {one:.2f} | {same:.2f} | {more:.2f} |" in section(report.json())


async def test_right_drafts_that_come_for_nothing_bring_what_their_rows_leave() -> None:
    found = {one.id: one.value or 0.0 for one in await row_figures(quick=True)}
    assert found.keys() == {"rows_rate_embedded", "rows_gain_4_embedded", "rows_step_4_embedded"}
    tokens = found["rows_step_4_embedded"] * found["rows_gain_4_embedded"]
    assert tokens == pytest.approx(5, rel=0.05), "of a step, the last one perhaps fewer"


def test_turns_are_those_with_an_answer_in_the_order_of_their_times(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2, "input": "b", "output": "two", "session_id": "x"},
        {"timestamp": 3, "input": "c", "output": "", "session_id": "x"},
        {"timestamp": 1, "input": "a", "output": "one", "session_id": "y"},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [turn.session for turn in recorded_turns(path)] == [b"y", b"x"]
    assert all(turn.prompt and turn.output for turn in recorded_turns(path))


async def test_what_has_no_texts_is_named(tmp_path: Path) -> None:
    for path, word in (
        (tmp_path / "none.jsonl", "no such file"),
        (ROOT / "loadtest/traces/swe_agents.jsonl.gz", "texts"),
    ):
        with pytest.raises(ConfigError, match=word):
            await measure(True, [], [path])
        with pytest.raises(TraceError, match=word):
            texts(path)


async def test_a_bound_model_says_what_the_small_one_says(tmp_path):
    small = Path(embedded("penstock-mini-draft"))
    large = bound(small, 4_000_000, tmp_path)
    assert (large / "model.safetensors").stat().st_size > 2 * (small / "model.safetensors").stat().st_size
    assert bound(small, 4_000_000, tmp_path) == large
    said = []
    for model in (small, large):
        async with Engine.open(EngineConfig(model, dtype="float32", threads=1, draft_tokens=0)) as engine:
            request = Request("a", tuple(range(300, 340)), SamplingParams(24, temperature=0.0, ignore_eos=True))
            said.append([token.token async for update in engine.generate(request) for token in update.tokens])
    assert said[0] == said[1] and len(said[0]) == 24


async def test_without_a_head_its_figures_say_what_is_missing(tmp_path: Path) -> None:
    found = await head_figures(None, True)
    assert [one.id for one in found] == ["head_ratio_worker_tool_calls", "head_ratio_service_tool_calls"]
    assert all(one.value is None and "penstock models head" in one.against for one in found)
    with pytest.raises(ConfigError, match=r"head = .*config\.json"):
        await head_figures(tmp_path, True)

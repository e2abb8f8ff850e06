"""Single requests of token ids: every token has its time, and what is no whole answer fails."""

from __future__ import annotations

import pytest
from tests.tools.load.token_server import Script, completion, event, serving

from penstock.load.asking import AskFailed, TokenClient
from penstock.load.target import LoadTarget


def client(port: int, **more: object) -> TokenClient:
    fields = {"prefix": "/v1", "endpoint": "completions", "model": "m", "retries": 5, "extra": {"temperature": 0}}
    return TokenClient(LoadTarget(host="127.0.0.1", port=port, tls=False, **{**fields, **more}))


async def test_tokens_are_taken_with_their_times_and_the_usage() -> None:
    script, begun = Script(completion), []
    async with serving(script) as port:
        answer = await client(port).ask([7, 8, 9], 5, "s-1", lambda: begun.append(1))
    assert answer.ids == [1000, 1001, 1002, 1003, 1004] and begun == [1]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.refusals) == (3, 16, 0)
    assert len(answer.times) == 5 and answer.times == sorted(answer.times)
    assert answer.times[1] == answer.times[2], "they came in one event"
    assert 0 < answer.time_to_first_token <= answer.request_latency
    assert len(answer.gaps) == 4 and sum(answer.gaps) == pytest.approx(answer.times[-1] - answer.times[0])
    assert script.sessions == ["s-1"]
    asked = script.asked[0]
    assert (asked["prompt"], asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == ([7, 8, 9], 5, True, 0)


async def test_events_may_come_in_any_pieces() -> None:
    def writes(body):
        text = b"".join(completion(body))
        return [text[at : at + 7] for at in range(0, len(text), 7)]

    async with serving(Script(writes)) as port:
        answer = await client(port).ask([7], 6, "s")
    assert answer.ids == [*range(1000, 1006)] and answer.prompt_tokens == 1


async def test_the_events_of_llama_server() -> None:
    def writes(body):
        last = {"stop": True, "stop_type": "limit", "tokens": [], "tokens_evaluated": 9, "timings": {"cache_n": 4}}
        return [*(event({"stop": False, "tokens": [id]}) for id in range(body["n_predict"])), event(last)]

    async with serving(Script(writes)) as port:
        answer = await client(port, endpoint="llamaserver", prefix="").ask([1], 3, "s")
    assert (answer.ids, answer.prompt_tokens, answer.cached_tokens) == ([0, 1, 2], 9, 4)


async def test_a_refusal_is_tried_again_and_its_time_counts() -> None:
    refusals = [(503, "retry-after: 0\r\n"), (429, "retry-after: 0\r\n")]
    async with serving(Script(completion, refusals)) as port:
        answer = await client(port).ask([7], 2, "s")
    assert answer.refusals == 2 and len(answer.ids) == 2


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Script(completion, [(400, "")]), "status 400: busy"),
        (Script(lambda body: completion(body | {"max_tokens": 3})), "3 tokens came instead of 4"),
        (Script(lambda body: completion(body)[:2], cut=True), "the connection ended before the answer did"),
        (Script(lambda body: [event({"error": {"message": "broken"}})]), "broken"),
        (Script(lambda body: [b"data: {x}\n\n"]), "an event that can't be read"),
        (Script(lambda body: [b"data: " + b"x" * 9], [(503, "")]), "no whole answer within 0.3 s"),
    ],
)
async def test_what_is_no_whole_answer_fails(script: Script, said: str) -> None:
    async with serving(script) as port:
        with pytest.raises(AskFailed, match=said):
            await client(port, timeout_s=0.3).ask([7], 4, "s")


async def test_a_server_that_is_not_there() -> None:
    async with serving(Script(completion)) as port:
        pass
    with pytest.raises(AskFailed, match=r"Connect call failed|refused"):
        await client(port).ask([7], 4, "s")

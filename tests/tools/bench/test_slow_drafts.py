"""The drafter and the link of `penstock bench speculation --part delay`, and how their figures are written."""

from __future__ import annotations

import asyncio

from penstock.bench.harness import BenchReport, figure, missing
from penstock.bench.measured.document import section
from penstock.bench.speculation.delays import KnownTexts
from penstock.bench.speculation.meshes import FORMS
from penstock.testing.slow_link import SlowLink

TEXT = [(place * place) % 89 for place in range(1000)]


def test_a_drafter_is_right_as_often_as_it_is_told() -> None:
    texts = KnownTexts(100)
    texts.add(TEXT)
    for right in (1.0, 0.8, 0.0):
        texts.right = right
        guesses = [texts.guess(TEXT[:place]) for place in range(24, 1000)]
        assert guesses == [texts.guess(TEXT[:place]) for place in range(24, 1000)], "the same each time"
        assert all(0 <= guess < 100 for guess in guesses)
        share = sum(one == real for one, real in zip(guesses, TEXT[24:], strict=True)) / len(guesses)
        assert abs(share - right) < 0.1
    assert texts.guess([1, 2, 3]) == 1, "of a text that nobody knows"


async def test_a_link_holds_bytes_back_and_changes_none() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    loop = asyncio.get_running_loop()
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        link = SlowLink(server.sockets[0].getsockname()[1], delay_s=0.05)
        async with link.serving() as address:
            reader, writer = await asyncio.open_connection(*address.split(":"))
            for word in (b"one", b"another"):
                began = loop.time()
                writer.write(word)
                assert await reader.readexactly(len(word)) == word
                assert loop.time() - began >= 0.05
            writer.write(b"x" * 100_000)
            writer.write_eof()
            assert await reader.read() == b"x" * 100_000, "to the end, and its end is passed on"
            writer.close()


def test_figures_of_each_part_are_shown_and_of_others_nothing() -> None:
    found = [
        figure("speedup_quote", [2.5], "ratio", "no drafts", 2.0),
        figure("worst_ratio", [0.9], "ratio", "no drafts", 0.97),
        figure("plain_all_text_4_bound", [61.0], "tokens/s", "scale"),
        *(figure(f"ratio_{form}_text_4_bound", [1.25], "ratio", "no drafts") for form in FORMS),
        figure("accepted_all_text_4_bound", [0.31], "per token", "scale"),
    ]
    text = section(BenchReport("speculation", found).json())
    assert "| text 4 bound | 61.0 | 1.25 | 1.25 | 1.25 | 1.25 | 0.31 |" in text
    assert "0.97, missed" in text and "right" not in text and "best peer" not in text and "draft head" not in text
    rows = [
        figure("rows_rate_bound", [60.0], "tokens/s", "scale"),
        *(figure(f"rows_gain_{count}_bound", [1 + count / 4], "ratio", "no drafts") for count in (2, 8)),
        *(figure(f"rows_step_{count}_bound", [1.5], "ratio", "no drafts") for count in (2, 8)),
    ]
    text = section(BenchReport("speculation", rows).json())
    assert "| target, drafts of a step | 2 | 8 |" in text
    assert "| bound, seconds of a step | 1.50 | 1.50 |" in text and "| bound, tokens/s | 1.50 | 3.00 |" in text
    heads = [
        figure("head_state_bytes_per_token", [1536], "bytes", "scale"),
        figure("head_plain_worker_text_8", [90.0], "tokens/s", "scale"),
        figure("head_ratio_worker_text_8", [1.21], "ratio", "no drafts"),
        figure("head_accepted_worker_text_8", [0.4], "per token", "scale"),
        figure("head_ratio_service_text_8", [1.1], "ratio", "no drafts"),
        figure("head_accepted_service_text_8", [0.39], "per token", "scale"),
    ]
    text = section(BenchReport("speculation", heads).json())
    assert "| text 8 | 90.0 | 1.21 | 0.40 | 1.10 | 0.39 |" in text and "1,536 bytes" in text
    branches = [
        figure("second_row", [1.6, 1.8, 2.0], "ratio", "a draft step of one row"),
        figure("rejections_text_drawn_4", [0.75], "per pass", "scale"),
        figure("branch_ready_text_drawn_4", [0.17], "per rejection", "scale"),
        figure("branch_gain_text_drawn_4", [1.04], "ratio", "no branches"),
    ]
    text = section(BenchReport("speculation", branches).json())
    assert "| text drawn 4 | 0.75 | 0.17 | 1.04 |" in text and "1.8 times as long (1.6 to 2.0)" in text
    link = [
        figure("worst_ratio_delay", [0.98], "ratio", "no drafts", 0.97),
        missing("break_even_ms", "ms", "no delay at which drafts paid"),
        *(figure(f"ratio_delay_80_{delay}ms", [3.0 - delay / 25], "ratio", "no drafts") for delay in (0, 50)),
        *(figure(f"accepted_delay_80_{delay}ms", [0.7 - delay / 100], "per token", "scale") for delay in (0, 50)),
    ]
    text = section(BenchReport("speculation", link).json())
    assert "| drafts | 0ms | 50ms |" in text and "| 80 % right | 3.00 | 1.00 |" in text
    peers = [
        figure("tool_calls_vs_best_peer", [1.4], "ratio", "vllm_lookup", 1.2),
        figure("rate_tool_calls_mesh", [140.0], "tokens/s", "scale"),
        figure("rate_tool_calls_vllm_lookup", [100.0], "tokens/s", "scale"),
        figure("tool_calls_vs_vllm_lookup", [1.4], "ratio", "vllm_lookup"),
    ]
    report = BenchReport("speculation", peers).json()
    assert "| vllm_lookup | 100 | 1.40 |" in section(report) and "here vllm_lookup" in section(report)

"""`penstock simulate --rates`: what a bench measured is simulated, and a file that does not have it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.harness import BenchReport, Figure, figure, missing
from penstock.simulator.command import app
from penstock.simulator.rates import UNITS, RatesError, rates, read_rates
from penstock.simulator.workers import WorkerModel

MEASURED = {
    "rates_prefill_tokens_per_s": 1000.0,
    "rates_prefill_context_s": 1e-6,
    "rates_step_base_s": 0.01,
    "rates_step_sequence_s": 0.001,
    "rates_step_token_s": 0.0,
    "rates_fetch_bytes_per_s": 1e6,
}


def kept(path: Path, *more: Figure, without: str = "", **values: float) -> Path:
    """A report with the rates, but for one of them or with others, behind other figures."""
    found = [figure(id, [value], UNITS[id], "for scale") for id, value in (MEASURED | values).items() if id != without]
    other = missing("simulator_ttft_error", "ratio", "a test", 0.2)
    path.write_text(BenchReport("router", [other, *found, *more]).json(), encoding="utf-8")
    return path


def test_each_rate_of_a_model_is_a_figure() -> None:
    assert rates(WorkerModel()).keys() == UNITS.keys()


def test_a_model_has_the_rates_of_the_file(tmp_path: Path) -> None:
    model = read_rates(kept(tmp_path / "rates.json"))
    assert rates(model) == MEASURED
    assert model.kv_tokens == WorkerModel().kv_tokens, "no rate: as in any model"


def test_a_file_that_lacks_rates_is_refused(tmp_path: Path) -> None:
    """Made-up rates beside measured ones would pass for measured."""
    path = tmp_path / "rates.json"
    with pytest.raises(RatesError, match=r"no rates_step_base_s; `penstock bench router --part simulator --json`"):
        read_rates(kept(path, without="rates_step_base_s"))
    unmeasured = missing("rates_step_base_s", "s", "a test")
    with pytest.raises(RatesError, match=r"no rates_step_base_s; "):
        read_rates(kept(path, unmeasured, without="rates_step_base_s"))
    path.write_text(BenchReport("engine", [figure("decode_b1", [1.0], "s", "for scale")]).json(), encoding="utf-8")
    with pytest.raises(RatesError, match=f"no {', '.join(UNITS)}; "):
        read_rates(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\x00", b"[]", b"{}", b'{"hash_ids": [1]}\n{}', b'{"figures": [{"id": "a", "value": "fast"}]}'],
    ids=["empty", "binary", "list", "object", "trace", "words"],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(content)
    with pytest.raises(RatesError, match="not what `penstock bench router --part simulator --json` prints: "):
        read_rates(path)


def test_a_rate_that_no_worker_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    with pytest.raises(RatesError, match="rates_prefill_tokens_per_s is 0 and must be above 0"):
        read_rates(kept(path, rates_prefill_tokens_per_s=0.0))
    with pytest.raises(RatesError, match="rates_step_token_s is -1 and must be at least 0"):
        read_rates(kept(path, rates_step_token_s=-1.0))


def test_what_was_measured_is_simulated_and_options_count_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prompt of 1,000 tokens, and ten steps. Options count as well when they say what is the default."""
    trace, file = tmp_path / "trace.jsonl", str(kept(tmp_path / "rates.json"))
    trace.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 11, "hash_ids": [1, 2]}')

    def called(*more: str) -> tuple[float, float]:
        assert app([str(trace), "--both", "1", "--json", *more], result_action="return_value") == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found["ttft_s_p50"], found["itl_s_p50"]

    assert called("--rates", file) == pytest.approx((1.5, 0.011))
    assert called("--rates", file, "--prefill-context-s", "0") == pytest.approx((1.0, 0.011))
    options = ("--prefill-rate", "5000", "--prefill-context-s", "0", "--step-base-s", "0.02")
    assert called("--rates", file, *options) == pytest.approx((0.2, 0.021))
    assert called() == pytest.approx((0.2, 0.0203), rel=0.01), "the documented defaults"


def test_the_command_names_a_file_that_has_no_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, words in (
        (tmp_path / "nothing.json", "no such file; `penstock bench router --part simulator --json` prints one"),
        (tmp_path, "not what `penstock bench router --part simulator --json` prints: "),
        (kept(tmp_path / "part.json", without="rates_fetch_bytes_per_s"), "it has no rates_fetch_bytes_per_s; "),
    ):
        assert app(["trace.jsonl", "--rates", str(path)], result_action="return_value") == 2
        assert f"penstock simulate: --rates {path}: {words}" in capsys.readouterr().err

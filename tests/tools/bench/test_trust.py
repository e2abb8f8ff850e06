"""The figures of what guards cost."""

from __future__ import annotations

import pytest

from penstock.bench.harness import BenchReport
from penstock.bench.measured.document import section
from penstock.bench.trust.attacks import attacks
from penstock.bench.trust.measure import measure
from penstock.bench.trust.sealing import rates
from penstock.bench.trust.sockets import WaySample, way_figures
from penstock.runtime.config import ConfigError


def test_sockets_are_beside_ports_round_by_round() -> None:
    found = {
        one.id: one for one in way_figures([WaySample(0.01, 90.0)] * 2, [WaySample(0.02, 100.0), WaySample(0.01, 90.0)])
    }
    assert (found["unix_vs_tcp_ttft"].min, found["unix_vs_tcp_ttft"].max) == (0.5, 1.0)
    assert found["unix_vs_tcp_ttft"].met is True
    assert (found["unix_vs_tcp_tokens_per_s"].min, found["unix_vs_tcp_tokens_per_s"].met) == (0.9, False)
    text = section(BenchReport("trust", list(found.values())).json())
    assert "TTFT over Unix sockets : over ports" in text


def test_seals_are_beside_memcpy_and_plain_blocks_round_by_round() -> None:
    got = {"memcpy in": [10.0, 10.0], "memcpy out": [20.0, 10.0], "put": [5.0, 7.0], "plain put": [10.0, 7.0]}
    got |= {"get": [16.0, 9.0], "plain get": [16.0, 18.0], "remote get": [1.0, 1.0], "plain remote get": [2.0, 1.0]}
    found = {one.id: one for one in rates(got, "_64kib")}
    assert (found["sealed_get_vs_memcpy_64kib"].min, found["sealed_get_vs_memcpy_64kib"].max) == (0.8, 0.9)
    assert found["sealed_get_vs_memcpy_64kib"].met is True
    assert (found["sealed_put_vs_memcpy_64kib"].min, found["sealed_put_vs_memcpy_64kib"].met) == (0.5, True)
    assert found["sealed_get_vs_plain_64kib"].max == 1.0
    text = section(BenchReport("trust", [*found.values(), *way_figures([WaySample(1, 1)], [WaySample(1, 1)])]).json())
    assert "sealed get : memcpy, blocks of 64 KiB" in text and "1 MiB" not in text


def test_an_attack_that_was_skipped_was_not_tried() -> None:
    report = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
    tried, succeeded = attacks(report)
    assert (tried.value, succeeded.value, succeeded.met) == (7, 2, False)
    assert attacks(report.replace('"1"', '"0"'))[1].met is True


async def test_a_part_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="must be one of sockets, sealing, attacks, mutants"):
        await measure(True, ["locks"])

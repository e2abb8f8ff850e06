"""The figures of what guards cost."""

from __future__ import annotations

import pytest

from penstock.bench.harness import BenchReport
from penstock.bench.measured.document import section
from penstock.bench.trust.attacks import attacks
from penstock.bench.trust.faults.measure import figures, matrix, told
from penstock.bench.trust.faults.scene import FaultCell, Strike
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


def cell(**changes: object) -> FaultCell:
    fields = {"service": "decode-0", "act": "kill", "phase": "decoding", "reached": True, "lost": "", "wrong": 0}
    return FaultCell(**{**fields, "pause_s": 0.5, "again": 0, **changes})  # type: ignore[arg-type]


def test_the_worst_of_all_faults_counts() -> None:
    strikes = [
        Strike([cell(), cell(phase="queued", reached=False, pause_s=0.0)], -0.5, 0.2),
        Strike([cell(act="cut", pause_s=4.0), cell(act="cut", service="decode-1", wrong=2)], 1.5, 0.1, 0.25),
    ]
    found = {one.id: one for one in figures(strikes, leaks=0)}
    values = {id.removeprefix("fault_"): one.value for id, one in found.items()}
    assert values == {
        "cells": 3,
        "streams_lost": 0,
        "tokens_wrong": 2,
        "leaks": 0,
        "overdue_s": 1.5,
        "back_s": 0.2,
        "late_s": 0.25,
        "pause_s_kill": 0.5,
        "pause_s_cut": 4.0,
    }
    assert "3 of 4 requests" in found["fault_cells"].against
    assert found["fault_pause_s_cut"].against == "worst: cut decode, decoding"
    assert found["fault_overdue_s"].against == "worst: cut decode"
    assert found["fault_tokens_wrong"].met is found["fault_overdue_s"].met is found["fault_pause_s_cut"].met is False
    assert [*map(told, strikes)] == [
        [],
        [
            "cut decode-1, decoding: 2 tokens are wrong",
            "cut decode-0, decoding: a pause of 4.0 s; this process was late by 0.25 s at most",
            "cut decode-0: a request outlived its deadline by 1.5 s; this process was late by 0.25 s at most",
        ],
    ]
    assert "longest pause of a stream, cut" in section(BenchReport("trust", list(found.values())).json())


def test_each_kind_of_service_gets_each_fault_idle_and_busy() -> None:
    found = [*matrix(["decode-0", "decode-1", "kvstore", "redis"])]
    assert len(found) == len({*found}) == 2 * (6 + 7 + 5)
    assert {service for service, *_ in found} == {"decode-0", "kvstore", "redis"}
    assert ("kvstore", "corrupt", True) in found and ("redis", "disk full", True) not in found


async def test_a_part_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="must be one of sockets, sealing, attacks, faults, mutants"):
        await measure(True, ["locks"])

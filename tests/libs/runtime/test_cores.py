"""Cores and how they are shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime import cores
from penstock.runtime.cores import Share, available_cores, cores_of, format_cores, parse_cores, shares

SMALL, LARGE = 11 << 20, 1 << 30


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [(2, None, 2), (8, 2.0, 2), (8, 2.5, 3), (2, 8.0, 2), (4, 0.1, 1), (1, None, 1)],
)
def test_what_may_be_used(affinity, quota, expected):
    assert cores_of(affinity, quota) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "rubbish"}, None),
        ({}, None),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, files, expected):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cores._quota(tmp_path) == expected


@given(st.integers(1, 64), st.integers(1, 70), st.integers(1, 12), st.sampled_from([SMALL, LARGE]))
def test_nobody_has_more_threads_than_there_are_cores(count, usable, workers, weights):
    usable = min(count, usable)
    affinity = [3 * number for number in range(count)]
    given_out = shares(affinity, usable, workers, weights)
    assert len(given_out) == workers
    assert all(1 <= share.threads <= usable for share in given_out)
    assert sum(share.threads for share in given_out) <= max(usable, workers * (1 if weights == SMALL else 2))
    pinned = [core for share in given_out for core in share.cores]
    assert len(pinned) == len(set(pinned)), "no core has two owners"
    assert set(pinned) <= set(affinity)
    assert all(len(share.cores) == share.threads for share in given_out if share.cores)
    assert not pinned or len(pinned) <= count - 2, "the other services have cores as well"


def test_few_cores_are_nobodys_own():
    assert shares([0, 1], 2, 2, SMALL) == [Share(1), Share(1)]
    assert shares([0, 1], 2, 1, SMALL) == [Share(2)]
    assert shares([0], 1, 2, LARGE) == [Share(1), Share(1)]
    assert shares([0, 1], 2, 3, LARGE) == [Share(2), Share(2), Share(2)]
    assert shares([0, 1], 2, 1, LARGE) == [Share(2)]
    assert shares([0, 1, 2, 3], 4, 2, LARGE) == [Share(2), Share(2)]
    assert shares(list(range(6)), 6, 2, LARGE) == [Share(2, (0, 1)), Share(2, (2, 3))]
    assert shares(list(range(16)), 4, 2, LARGE) == [Share(2), Share(2)], "a quota"


def test_lists_of_cores():
    assert parse_cores("") == frozenset()
    assert parse_cores("0-3,8") == {0, 1, 2, 3, 8}
    assert parse_cores(format_cores({5, 1, 2})) == {1, 2, 5}
    for wrong in ("a", "1-", "-1", "3-1", "0-100000", "1,,2"):
        with pytest.raises(ValueError, match="write for example"):
            parse_cores(wrong)


def test_threads_of_a_process_that_stays_stay_too():
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, threading; from penstock.runtime.cores import available_cores, stay_on\n"
        f"stay_on([{core}])\n"
        "found = []\n"
        "thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        f"assert found == [{{{core}}}] and available_cores() == 1, found"
    )
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_this_process_has_some():
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))

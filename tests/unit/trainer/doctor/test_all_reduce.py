"""Sums over real ranks, and planted results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.doctor.all_reduce import Sums, check_sums, measure
from trainer.doctor.check import Severity

GOOD = Sums("nccl", 8, ("a",) * 24, 2e11)


@pytest.mark.long
def test_two_ranks_on_the_cpu_have_the_same_sum_in_three_runs() -> None:
    found = measure(0)
    assert (found.error, found.backend, found.num_ranks) == ("", "gloo", 2)
    assert len(found.digests) == 6
    assert len(set(found.digests)) == 1
    assert found.bytes_per_s > 0
    assert check_sums(found).severity is Severity.OK


@pytest.mark.long
def test_ranks_that_do_not_finish_in_time_are_ended_and_reported() -> None:
    found = measure(0, timeout_s=0.1)
    assert found.error == "the ranks did not finish within 0.1 s"
    assert check_sums(found).severity is Severity.ERROR


def test_sums_that_differ_are_an_error_and_a_slow_link_is_a_warning() -> None:
    assert check_sums(GOOD).found == "nccl on 8 ranks: same bits in 3 runs, 200.0 GB/s"
    different = check_sums(replace(GOOD, digests=("a", "b", "a")))
    assert (different.severity, "2 different sums" in different.found) == (Severity.ERROR, True)
    assert "NCCL_ALGO" in different.remedy
    assert check_sums(replace(GOOD, bytes_per_s=1e9)).severity is Severity.WARNING
    failed = check_sums(Sums("nccl", 8, error="unhandled system error"))
    assert (failed.severity, "NCCL_DEBUG=INFO" in failed.remedy) == (Severity.ERROR, True)

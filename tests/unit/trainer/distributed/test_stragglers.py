"""A slow rank is found soon. Ranks whose times only vary are never reported."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trainer.distributed.stragglers import HostMark, OwnTime, OwnTimer, SlowRank, StragglerDetector, slow_rank

STEP_S = 0.2
OWN_S = 0.1


def noisy(generator: np.random.Generator, num_ranks: int, kind: str) -> list[float]:
    """Return own times of one step of equally fast ranks."""
    if kind == "spread":
        return list(OWN_S * generator.lognormal(0, 0.3, num_ranks))
    pauses = generator.random(num_ranks) < 0.05
    return list(OWN_S * generator.lognormal(0, 0.1, num_ranks) + pauses * generator.pareto(1.5, num_ranks))


def steps_until_found(
    seconds: Callable[[int], list[float]], num_steps: int, data: Callable[[list[float]], list[float]] = lambda own: [0.0] * len(own)
) -> tuple[int, SlowRank] | None:
    detector = StragglerDetector()
    for step in range(1, num_steps + 1):
        own = seconds(step)
        found = detector.observe([OwnTime(*pair) for pair in zip(own, data(own), strict=True)], max(own) + STEP_S - OWN_S)
        if found:
            return step, found
    return None


@pytest.mark.parametrize("kind", ["spread", "pauses"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_is_slow_in_ten_thousand_uneven_steps(kind: str, num_ranks: int) -> None:
    generator = np.random.default_rng(num_ranks)
    assert steps_until_found(lambda _: noisy(generator, num_ranks, kind), 10_000) is None


@pytest.mark.parametrize("kind", ["spread", "pauses"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_that_becomes_three_times_slower_is_found_within_20_steps(kind: str, num_ranks: int) -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        slow, begins = seed % num_ranks, 30

        def own(step: int) -> list[float]:
            times = noisy(generator, num_ranks, kind)  # noqa: B023
            times[slow] *= 3 if step > begins else 1  # noqa: B023
            return times

        found = steps_until_found(own, begins + 20)
        assert found is not None, f"seed {seed}"
        assert (found[0] > begins, found[1].rank, found[1].phase) == (True, slow, "compute")
        assert 2 <= found[1].factor < 5


def test_the_phase_is_where_most_of_the_difference_arises() -> None:
    slow_data = steps_until_found(lambda _: [0.1, 0.3, 0.1], 20, lambda _: [0.01, 0.2, 0.01])
    slow_compute = steps_until_found(lambda _: [0.1, 0.3, 0.1], 20, lambda _: [0.01, 0.03, 0.01])
    assert slow_data is not None
    assert slow_compute is not None
    assert (slow_data[1].phase, slow_compute[1].phase) == ("data", "compute")
    assert slow_data[1].describe() == (
        "rank 1 is slow: it works 300 ms in each step, and the other ranks 100 ms (3.0 times), most of the difference in "
        "data; all ranks wait for it. Training continues; check its storage, or increase prefetch"
    )


def test_what_costs_less_than_10_ms_or_a_tenth_of_a_step_is_not_reported() -> None:
    def times(slow_s: float, other_s: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.tile([slow_s, other_s], (15, 1))

    assert slow_rank(times(0.012, 0.004), times(0, 0), step_s=0.02) is None
    assert slow_rank(times(0.015, 0.004), times(0, 0), step_s=0.02) is not None
    assert slow_rank(times(0.15, 0.05), times(0, 0), step_s=1.1) is None
    assert slow_rank(times(0.15, 0.05), times(0, 0), step_s=0.9) is not None
    assert slow_rank(times(0.15, 0.08), times(0, 0), step_s=0.2) is None, "less than twice as slow"


def test_a_rank_is_slow_only_if_it_was_so_in_11_of_15_steps() -> None:
    for num_slow, expected in ((8, None), (10, None), (11, 0)):
        own_SR = np.full((15, 3), 0.1)
        own_SR[:num_slow, 0] = 0.3
        found = slow_rank(own_SR, np.zeros((15, 3)), 0.4)
        assert (found.rank if found else None) == expected, num_slow


def test_one_of_several_slow_ranks_is_found() -> None:
    found = steps_until_found(lambda _: [0.1, 0.3, 0.1, 0.1, 0.28], 20)
    assert found is not None
    assert (found[0], found[1].rank, round(found[1].factor, 3)) == (15, 1, 3)


def test_one_rank_alone_is_not_slow() -> None:
    assert slow_rank(np.full((15, 1), 9.0), np.zeros((15, 1)), 1.0) is None


def test_a_slow_rank_is_reported_once_in_a_thousand_steps_and_another_one_at_once() -> None:
    detector = StragglerDetector()
    slow = {range(0, 1100): 0, range(1100, 1200): 1}
    found = []
    for step in range(1200):
        rank = next(rank for steps, rank in slow.items() if step in steps)
        if report := detector.observe([OwnTime(0.3 if other == rank else 0.1, 0) for other in range(3)], 0.4):
            found.append((step, report.rank))
    assert [rank for _, rank in found] == [0, 0, 1]
    assert [step for step, _ in found][:2] == [14, 1015]
    assert found[2][0] <= 1120


class FakeMark:
    """A moment that a device reaches later."""

    now_s = 0.0

    def __init__(self) -> None:
        self.at_s = FakeMark.now_s
        self.is_reached = False

    def reached(self) -> bool:
        return self.is_reached

    def seconds_since(self, earlier: object) -> float:
        assert isinstance(earlier, FakeMark)
        return self.at_s - earlier.at_s


def test_own_time_runs_from_the_last_exchange_to_the_first_and_is_read_once_the_device_is_there() -> None:
    marks: list[FakeMark] = []

    def mark() -> FakeMark:
        marks.append(FakeMark())
        return marks[-1]

    def tick(seconds: float) -> None:
        FakeMark.now_s += seconds

    timer = OwnTimer(mark)
    tick(100)  # an evaluation
    timer.begin()
    timer.waited_for_data(0.25)
    tick(1)
    timer.end()
    assert timer.latest() == OwnTime(0, 0), "the step is not finished"
    tick(50)  # the others
    timer.begin()
    timer.waited_for_data(9)
    tick(2)
    timer.end()
    marks[2].is_reached = True
    assert timer.latest() == OwnTime(1, 0.25)
    marks[4].is_reached = True
    assert timer.latest() == OwnTime(2, 2), "at most the own time"
    timer.begin()
    assert timer.latest() == OwnTime(2, 2)


def test_on_the_host_own_time_is_known_at_once() -> None:
    timer = OwnTimer(HostMark)
    timer.begin()
    timer.end()
    first = timer.latest()
    assert 0 < first.seconds < 60
    assert first.data_s == 0


def test_what_lies_between_two_steps_is_left_out_but_not_the_work_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMark.now_s = 0.0
    monkeypatch.setattr(FakeMark, "reached", lambda _: True)
    timer = OwnTimer(FakeMark)
    timer.begin()
    for work_s, evaluation_s in ((1, 100), (2, 200)):
        FakeMark.now_s += work_s
        with timer.paused():
            FakeMark.now_s += evaluation_s
    FakeMark.now_s += 4
    timer.end()
    assert timer.latest() == OwnTime(7, 0)
    timer.begin()
    timer.end()
    assert timer.latest() == OwnTime(0, 0), "the last step does not count"

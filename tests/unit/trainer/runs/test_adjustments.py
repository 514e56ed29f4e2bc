import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import BatchConfig
from trainer.runs.adjustments import Adjustment, Adjustments, smaller_micro

adjustments_of_a_run = st.lists(
    st.one_of(
        st.builds(Adjustment, step=st.integers(0, 30), reason=st.text(max_size=5), micro=st.sampled_from([1, 2, 4, 8])),
        st.builds(
            Adjustment,
            step=st.integers(0, 30),
            reason=st.text(max_size=5),
            shards=st.lists(st.text(max_size=3), max_size=3).map(tuple),
        ),
        st.builds(Adjustment, step=st.integers(0, 30), reason=st.text(max_size=5), cooldown_end=st.integers(31, 40)),
    ),
    max_size=6,
)


@given(micro=st.integers(1, 5000))
def test_smaller_micro_batches_are_the_largest_that_divide(micro: int) -> None:
    divisors = [rows for rows in range(1, micro) if micro % rows == 0]
    assert smaller_micro(micro) == (max(divisors) if divisors else None)


def test_even_rows_are_halved_and_odd_ones_fall_to_a_divisor() -> None:
    assert [smaller_micro(rows) for rows in (64, 6, 9, 3, 1)] == [32, 3, 3, 1, None]


@given(made=adjustments_of_a_run, step=st.integers(0, 40))
def test_an_adjustment_holds_from_its_step_on(made: list[Adjustment], step: int) -> None:
    adjustments, begun = Adjustments().plus(*made), BatchConfig(global_batch_size=16, micro_batch_size=8)
    holding = [adjustment for adjustment in made if adjustment.step <= step]
    assert adjustments.batch(begun, step).micro_rows == min(
        [8, *(adjustment.micro for adjustment in holding if adjustment.micro is not None)]
    )
    assert adjustments.batch(begun, step).global_batch_size == 16
    assert adjustments.quarantined(step) == {shard for adjustment in holding for shard in adjustment.shards}
    assert list(adjustments.beginning_at(step)) == [adjustment for adjustment in made if adjustment.step == step]


@given(made=adjustments_of_a_run)
def test_adjustments_survive_the_record(made: list[Adjustment]) -> None:
    adjustments = Adjustments(tuple(made))
    assert Adjustments.from_json(adjustments.to_json()) == adjustments
    assert adjustments.of(["micro", "quarantine", "cooldown"]) == adjustments
    assert adjustments.of(["micro"]).quarantined(99) == frozenset()


@pytest.mark.parametrize("end", [0, 4, 5])
def test_a_cooldown_that_ends_before_its_second_step_is_refused(end: int) -> None:
    changes = [{"step": 5, "reason": "time", "micro": None, "shards": [], "cooldown_end": end}]
    with pytest.raises(ValueError, match="the cool-down of step 5 ends at step"):
        Adjustments.from_json(changes)


def test_an_adjustment_says_what_it_is_and_why() -> None:
    smaller, lost = (
        Adjustment(step=7, reason="8 rows ran out of memory", micro=4),
        Adjustment(step=9, reason="rank 1 could not read it", shards=("train/a.arrow",)),
    )
    assert (smaller.kind, smaller.facts()) == ("micro", {"rows": 4, "reason": "8 rows ran out of memory"})
    assert (lost.kind, lost.facts()) == ("quarantine", {"shards": ["train/a.arrow"], "reason": "rank 1 could not read it"})
    assert smaller.describe() == "micro-batches of 4 rows from step 7 on, the same global batches: 8 rows ran out of memory"
    assert lost.describe() == "the rows of train/a.arrow are padding from step 9 on: rank 1 could not read it"

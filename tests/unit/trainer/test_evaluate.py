import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_pipeline.shards import RowBatch
from tests.support.runs import tiny_config
from trainer.distributed import Group
from trainer.evaluate import evaluate
from trainer.model import build_model
from trainer.step import LossModule

LENGTH, VOCAB = 32, 50
ALONE = Group(0, 1, 0, torch.device("cpu"))


class RandomRows:
    """Rows of random tokens, one document each, of different lengths; remembers which were read."""

    row_length = LENGTH

    def __init__(self, num_rows: int) -> None:
        generator = np.random.default_rng(0)
        self.tokens = generator.integers(0, VOCAB, (num_rows, LENGTH), dtype=np.uint16)
        self.lengths = generator.integers(2, LENGTH + 1, num_rows)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        self.seen += indices.tolist()
        segments = np.where(np.arange(LENGTH) < self.lengths[indices, None], 0, -1).astype(np.int32)
        return RowBatch(self.tokens[indices], segments)

    def num_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lengths[indices] - 1


def measure(rows: RandomRows, group: Group = ALONE, **settings: int) -> float:
    config = tiny_config("data", "run", eval=settings)  # type: ignore[arg-type]
    loss = LossModule(build_model(config.model, VOCAB, 0), config.loss)
    return evaluate(loss, "sdpa", rows, config, group).loss  # type: ignore[arg-type]


def test_the_loss_is_the_mean_over_targets_not_over_rows() -> None:
    rows = RandomRows(5)
    one_by_one = [(measure(single(rows, number)), int(rows.lengths[number]) - 1) for number in range(5)]
    by_hand = sum(loss * weight for loss, weight in one_by_one) / sum(weight for _, weight in one_by_one)
    assert measure(rows) == pytest.approx(by_hand, rel=1e-6)


def single(rows: RandomRows, number: int) -> RandomRows:
    one = RandomRows(1)
    one.tokens, one.lengths = rows.tokens[number : number + 1], rows.lengths[number : number + 1]
    return one


def test_the_ranks_share_the_rows_and_their_sums_add_up_to_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(RandomRows(23))
    partial: list[torch.Tensor] = []
    monkeypatch.setattr(Group, "sum", lambda _, values: partial.append(values.clone()) or values)
    readers = [RandomRows(23) for _ in range(3)]
    for rank, rows in enumerate(readers):
        measure(rows, Group(rank, 3, rank, torch.device("cpu")))
    assert [row for rows in readers for row in rows.seen] == list(range(23))
    monkeypatch.setattr(Group, "sum", lambda _, values: values.copy_(sum(partial)))
    assert measure(RandomRows(23), Group(0, 3, 0, torch.device("cpu"))) == whole


def test_a_limited_evaluation_is_spread_over_all_rows() -> None:
    rows = RandomRows(40)
    measure(rows, max_rows=4)
    assert rows.seen == [0, 10, 20, 30]


def test_more_rows_than_there_are_means_all() -> None:
    rows = RandomRows(5)
    measure(rows, max_rows=100)
    assert rows.seen == list(range(5))

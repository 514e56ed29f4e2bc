from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.document_tables import read_validation_documents
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import RowBatch, Rows
from data_pipeline.prepare import prepare
from data_pipeline.tokenizer import load_tokenizer
from tests.support.grouped import write_grouped
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_config
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.data.batch import IGNORE, micro_batch
from trainer.distributed.group import Group
from trainer.evaluation.evaluate import evaluate
from trainer.evaluation.tally import NUM_PARTS, Evaluation, Grouping, Tally, exact_sum, length_ranges
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule
from trainer.runs.events import Score

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


def context(config: TrainConfig, group: Group = ALONE) -> RunContext:
    return RunContext(config, cast(Manifest, None), group, "sdpa")


def measure(rows: RandomRows, group: Group = ALONE, **settings: int) -> float:
    config = tiny_config("data", "run", eval=settings)  # type: ignore[arg-type]
    loss = LossModule(build_model(config.model, VOCAB, 0), config.loss)
    return evaluate(loss, context(config, group), rows).loss  # type: ignore[arg-type]


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


def grouped(group: Group, data: Path, max_rows: int | None = None) -> Evaluation:
    """The evaluation of a fresh model on all groups of prepared data; 3 rows at a time, so that batches mix sources."""
    manifest, tokenizer = read_manifest(data), load_tokenizer(data / "tokenizer")
    config = tiny_config(data, data, eval={"micro_batch_size": 3, "max_rows": max_rows})
    loss = LossModule(build_model(config.model, manifest.vocab_size, 0), config.loss)
    return evaluate(loss, context(config, group), Rows(data, manifest, "val"), grouping=Grouping.of(data, manifest, tokenizer))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grouped(tmp_path_factory.mktemp("data"))


def test_every_target_is_in_one_group_of_each_sort_and_the_losses_add_up(data: Path) -> None:
    evaluation = grouped(ALONE, data)
    assert list(evaluation.by_source) == ["a", "b", "c"]
    assert list(evaluation.by_kind) == ["prose", "code"]
    in_manifest = {shard.source: shard.targets for shard in read_manifest(data).shards if shard.split == "val"}
    assert {name: score.num_targets for name, score in evaluation.by_source.items()} == in_manifest
    for groups in evaluation.groups.values():
        assert sum(score.num_targets for score in groups.values()) == evaluation.num_targets
        assert sum(score.num_bytes for score in groups.values()) == evaluation.num_bytes
        together = sum(score.loss * score.num_targets for score in groups.values())
        assert together == pytest.approx(evaluation.loss * evaluation.num_targets, rel=1e-14)
    prose = [evaluation.by_source[name] for name in ("a", "c")]
    assert evaluation.by_kind["prose"].num_targets == sum(score.num_targets for score in prose)
    assert evaluation.by_kind["code"] == evaluation.by_source["b"]


def test_the_sums_of_the_groups_are_those_of_their_pieces_and_make_the_total_without_rounding(data: Path) -> None:
    manifest = read_manifest(data)
    rows = Rows(data, manifest, "val")
    tally = Tally(Grouping.of(data, manifest, load_tokenizer(data / "tokenizer")), manifest.row_length)
    by_source = [Fraction(0)] * 3
    by_length = [Fraction(0)] * 5
    for number in range(len(rows)):
        index = np.array([number])
        batch = micro_batch(rows.read(index))
        losses_BL = np.random.default_rng(number).gamma(2, 3, (1, manifest.row_length)).astype(np.float32)
        tally.add(losses_BL, batch, rows.source_ids(index))
        segments_L = batch.segments[0].numpy()
        first = 0
        for length in np.unique(segments_L[segments_L >= 0], return_counts=True)[1].tolist():
            nats = sum(map(Fraction, losses_BL[0, first : first + length - 1].tolist()), Fraction(0))
            by_source[int(rows.source_ids(index)[0])] += nats
            by_length[max(0, math.ceil(math.log2(length)) - 1)] += nats
            first += length
    sums = [[exact_sum(row[:NUM_PARTS]) for row in table] for table in (tally.by_source, tally.by_length)]
    assert sums == [by_source, by_length]
    total = exact_sum(tally.by_source[:, :NUM_PARTS].sum(axis=0))
    assert sum(sums[0]) == sum(sums[1]) == total
    evaluation = tally.evaluation(len(rows))
    assert evaluation.loss == float(total) / evaluation.num_targets


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One source with prose and code, whose documents are longer than a row."""
    folder = tmp_path_factory.mktemp("text") / "mixed"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.{'py' if number % 3 else 'txt'}").write_text(f"text {number} " + "word " * (3 + number))
    output = tmp_path_factory.mktemp("mixed") / "out"
    prepare(
        PrepareConfig(
            sources=(str(folder),),
            output=output,
            workers=1,
            row_length=LENGTH,
            tokenizer={"kind": "byte"},
            dedup={"near": False},
            split={"val_fraction": 0.5},
        )
    )
    return output


def test_the_groups_of_a_mixed_folder_follow_the_kind_and_length_of_each_document(mixed: Path) -> None:
    evaluation = grouped(ALONE, mixed)
    documents = read_validation_documents(mixed, read_manifest(mixed))
    assert documents is not None
    targets = documents.tokens_D.astype(np.int64) - 1  # each token except the first is a target once
    by_kind = {name: int(targets[documents.kinds_D == number].sum()) for number, name in enumerate(documents.kinds)}
    assert by_kind.pop("web") == 0
    assert {name: score.num_targets for name, score in evaluation.by_kind.items()} == by_kind
    assert list(evaluation.by_source) == ["mixed"]
    for name, score in evaluation.by_length.items():
        low, high = (int(bound) for bound in name.split("-"))
        assert score.num_targets == targets[(documents.tokens_D >= low) & (documents.tokens_D <= high)].sum()
    assert sum(score.num_targets for score in evaluation.by_length.values()) == evaluation.num_targets
    assert max(int(name.split("-")[1]) for name in evaluation.by_length) > LENGTH


def test_the_groups_have_the_same_bits_for_any_number_of_ranks(data: Path) -> None:
    alone = grouped(ALONE, data)
    for num_ranks in (2, 4):
        assert run_ranks(grouped, num_ranks, data) == [alone] * num_ranks


def test_groups_do_not_change_the_total(data: Path) -> None:
    config = tiny_config(data, data, eval={"micro_batch_size": 3})
    loss = LossModule(build_model(config.model, read_manifest(data).vocab_size, 0), config.loss)
    plain = evaluate(loss, context(config), Rows(data, read_manifest(data), "val"))
    divided = grouped(ALONE, data)
    assert (plain.loss, plain.num_targets, plain.num_rows) == (divided.loss, divided.num_targets, divided.num_rows)
    assert plain.bits_per_byte is None
    assert plain.groups == {"source": {}, "kind": {}, "length": {}}


def test_bytes_are_those_of_the_targets_text(data: Path) -> None:
    """The tokenizer has one id for each byte, and no document begins with bos: so there are as many bytes as targets."""
    evaluation = grouped(ALONE, data)
    assert evaluation.num_bytes == evaluation.num_targets
    assert evaluation.bits_per_byte == pytest.approx(evaluation.loss / math.log(2), rel=1e-15)


def test_a_limited_evaluation_counts_what_it_has_used(data: Path) -> None:
    evaluation = grouped(ALONE, data, max_rows=4)
    assert evaluation.num_rows == 4
    assert sum(score.num_targets for score in evaluation.by_source.values()) == evaluation.num_targets
    assert evaluation.num_targets < grouped(ALONE, data).num_targets


@given(row_length=st.integers(2, 5000), length=st.integers(2, 5000))
@settings(max_examples=50)
def test_every_length_is_in_the_range_that_its_name_says(row_length: int, length: int) -> None:
    names = length_ranges(row_length)
    bounds = [(int(name.split("-")[0]), int(name.split("-")[-1])) for name in names]
    assert bounds[0][0] == 2
    assert bounds[-1][1] == row_length
    assert all(low == high + 1 for (_, high), (low, _) in pairwise(bounds))
    if length <= row_length:
        segments_BL = np.where(np.arange(row_length) < length, 0, -1).astype(np.int32)[None]
        batch = micro_batch(RowBatch(np.zeros((1, row_length), np.uint16), segments_BL))
        tally = Tally(Grouping(), row_length)
        tally.add(np.ones((1, row_length), np.float32), batch, np.zeros(1, np.int64))
        [used] = np.flatnonzero(tally.by_length[:, NUM_PARTS])
        assert bounds[used][0] <= length <= bounds[used][1]
        assert tally.by_length[used, NUM_PARTS] == length - 1 == int((batch.targets != IGNORE).sum())


def test_a_loss_that_is_no_number_shows_in_its_groups_and_the_total_only(data: Path) -> None:
    manifest = read_manifest(data)
    tally = Tally(Grouping.of(data, manifest, load_tokenizer(data / "tokenizer")), manifest.row_length)
    rows = Rows(data, manifest, "val")
    batch = micro_batch(rows.read(np.array([0, len(rows) - 1])))
    losses_BL = np.ones((2, manifest.row_length), np.float32)
    losses_BL[0] = math.nan
    tally.add(losses_BL, batch, rows.source_ids(np.array([0, len(rows) - 1])))
    evaluation = tally.evaluation(2)
    assert math.isnan(evaluation.loss)
    assert math.isnan(evaluation.perplexity)
    assert math.isnan(evaluation.by_source["a"].loss)
    assert evaluation.by_source["c"].loss == 1
    assert evaluation.by_source["a"].to_json()["loss"] == "nan"


def test_without_targets_there_is_no_loss() -> None:
    evaluation = Tally(Grouping(), LENGTH).evaluation(0)
    assert evaluation.num_targets == 0
    assert math.isnan(evaluation.loss)
    assert evaluation.total.to_json()["loss"] == "nan"


def test_a_failed_evaluation_leaves_the_model_in_training() -> None:
    class Broken(RandomRows):
        def read(self, indices: NDArray[np.int64]) -> RowBatch:
            raise OSError("gone")

    config = tiny_config("data", "run")  # type: ignore[arg-type]
    loss = LossModule(build_model(config.model, VOCAB, 0), config.loss).train()
    with pytest.raises(OSError, match="gone"):
        evaluate(loss, context(config), Broken(3))  # type: ignore[arg-type]
    assert loss.training


def test_bits_per_byte_are_nats_by_ln_2_and_bytes() -> None:
    assert Score(2.0, 300, 450).bits_per_byte == pytest.approx(600 / math.log(2) / 450)
    assert Score(2.0, 300).bits_per_byte is None
    assert Score(1e4, 1).perplexity == math.inf


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_groups_are_those_of_the_cpu_and_repeat_bit_for_bit(data: Path) -> None:
    gpu = Group(0, 1, 0, torch.device("cuda", 0))
    manifest, tokenizer = read_manifest(data), load_tokenizer(data / "tokenizer")
    config = tiny_config(data, data, eval={"micro_batch_size": 3})
    loss = LossModule(build_model(config.model, manifest.vocab_size, 0), config.loss).to(gpu.device)
    grouping = Grouping.of(data, manifest, tokenizer)
    first, second = (evaluate(loss, context(config, gpu), Rows(data, manifest, "val"), grouping=grouping) for _ in range(2))
    assert first == second
    on_cpu = grouped(ALONE, data)
    for name, groups in first.groups.items():
        assert groups.keys() == on_cpu.groups[name].keys()
        assert all(score.loss == pytest.approx(on_cpu.groups[name][group].loss, rel=1e-4) for group, score in groups.items())

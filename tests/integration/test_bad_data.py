"""Shards that are lost or damaged during a training, on all ranks or one. By policy it stops or continues without their rows."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import PreparedDataError, ProjectError, StorageError, exit_code_of
from common.files import digest_file, write_atomic
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows, ShardError
from tests.support import runs
from tests.support.prepared import write_prepared
from tests.support.ranks import run_ranks
from tests.support.replays import replay_run
from tests.support.runs import losses, metrics
from trainer import loop
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.config import TrainConfig
from trainer.data import loader
from trainer.distributed.group import Group
from trainer.loop import train
from trainer.metrics.sinks.base import StepFacts
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import LedgerEvent, LedgerStep, read_ledger
from trainer.runs.saved_run import SavedRun
from trainer.training.saver import Saver
from trainer.training.start import open as openings
from trainer.training.step import StepResult, StepResults
from trainer.verification.audit import audit_run, show_step
from trainer.verification.verify import check_integrity

LOST = "train/b-00000.arrow"
QUARANTINE = {"policy": "quarantine", "max_share": 0.6}
tiny_config = partial(runs.tiny_config, loader={"retry_waits_s": (0.01, 0.01, 0.01)})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prepared(tmp_path / "data")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def delete_by_name(path: Path) -> None:
    """Empty a file and delete it. A deleted file stays readable through a mapping, unlike a file that its file system has lost."""
    truncate(path)
    path.unlink()


@contextmanager
def after_step(step: int, action: Callable[[], object]) -> Iterator[None]:
    """Call `action` after a step has been reported. Batches that were read ahead before that are not affected."""
    original = Saver.follow

    def follow(saver: Saver, result: StepResult) -> None:
        original(saver, result)
        if result.step == step:
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "follow", follow)
        yield


def quarantines(run: Path) -> list[tuple[int, tuple[str, ...]]]:
    changes = json.loads((run / "record.json").read_text())["changes"]
    return [(change["step"], tuple(change["shards"])) for change in changes]


def order_of(run: Path) -> list[tuple[int, int, str]]:
    return [(entry.head.step, entry.start, entry.digest) for entry in read_ledger(run / LEDGER) if isinstance(entry, LedgerStep)]


@pytest.mark.parametrize("damage", [truncate, flip, delete_by_name])
def test_a_shard_that_is_damaged_under_the_run_stops_it_by_name(data: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with after_step(3, lambda: damage(data / LOST)), pytest.raises(PreparedDataError, match=r"train/b-00000\.arrow"):
        train(tiny_config(data, tmp_path / "run", prefetch=1))
    assert [step for step, _ in losses(tmp_path / "run")] in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5])


@pytest.mark.parametrize("unreadable", [False, True])
def test_no_step_is_begun_behind_a_limit_on_tokens_while_results_are_on_their_way(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: bool
) -> None:
    """As on a GPU, the results of a step are read one step later. A rank that cannot read a batch does not know its targets. The
    other ranks know them and would end at the limit, while this rank began another step and waited for them.
    """
    train(tiny_config(data, tmp_path / "whole"))
    limit = [event["tokens"] for event in metrics(tmp_path / "whole", "train")][4]
    read, step, begun, failed = loader.global_batch, loop.train_step, list[int](), list[int]()

    def reading(rows: Any, order: Any, config: Any, group: Any, position: int, **settings: Any) -> Any:
        if unreadable and position == 4 * 8 and len(failed) < 2:  # the retry fails too
            failed.append(position)
            raise ShardError(LOST, "damaged")
        return read(rows, order, config, group, position, **settings)

    def stepping(trainable: Any, batch: Any, inputs: Any, **settings: Any) -> Any:
        begun.append(inputs.step)
        return step(trainable, batch, inputs, **settings)

    class Late(StepResults[StepFacts]):
        def __init__(self, lag: int) -> None:
            super().__init__(lag + 1)

    monkeypatch.setattr(loader, "global_batch", reading)
    monkeypatch.setattr(loop, "train_step", stepping)
    monkeypatch.setattr(loop, "StepResults", Late)
    limits = {"limits": {"steps": None, "tokens": limit}, "eval": {"every_steps": 50}, "checkpoint": {"every_steps": 50}}
    train(tiny_config(data, tmp_path / "run", data_errors=QUARANTINE, **limits))
    assert begun[: begun.index(5) + 2] == [1, 2, 3, 4, 5, *([5] if unreadable else [])]


def test_a_shard_in_quarantine_is_padding_and_all_else_stays_as_it_was(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    config = tiny_config(data, run, data_errors=QUARANTINE, prefetch=1, checkpoint={"keep_last": 9})
    whole = tmp_path / "whole"
    train(tiny_config(data, whole))
    drawn = audit_run(whole).drawn
    with after_step(6, lambda: flip(data / LOST)), caplog.at_level(logging.WARNING):
        result = train(config)
    [(step, shards)] = quarantines(run)
    assert shards == (LOST,)
    assert step in (7, 8, 9)
    assert order_of(run) == order_of(whole)
    assert losses(run)[: step - 1] == losses(whole)[: step - 1]
    assert losses(run)[step:] != losses(whole)[step:]
    assert f"step {step} is repeated: rank 0 could not read it" in caplog.text
    assert [event["step"] for event in metrics(run, "alert") if LOST in event["message"]] == [step]
    report = audit_run(run)
    assert report.quarantined == [LOST]
    assert report.uncounted > 0
    before, after = report.drawn["b"], report.padding["b"]
    assert (sum(report.drawn.values()) + after, report.padding["a"]) == (12 * 8, 0)
    assert before == report.uncounted
    assert after == drawn["b"] - before > 0
    assert f"b {before} of 31 ({before / 31:.2f} passes, and {after} as padding)" in report.describe()
    assert f"quarantine   {LOST}; the targets of {report.uncounted} of their rows" in report.describe()
    assert check_integrity(SavedRun(run)).quarantined
    assert result.endswith("steps 12")
    flip(data / LOST)
    assert audit_run(run).uncounted == 0
    for start in (0, 5, 10):
        assert replay_run(run, 2 if start == 10 else 7, start=start).difference == ""


def test_a_quarantine_is_remembered_when_the_shard_is_back(data: Path, tmp_path: Path) -> None:
    run, config = tmp_path / "run", tiny_config(data, tmp_path / "run", data_errors=QUARANTINE)
    flip(data / LOST)
    train(config.model_copy(update={"limits": config.limits.model_copy(update={"steps": 5})}))
    assert quarantines(run) == [(1, (LOST,))]
    flip(data / LOST)
    result = train(config)
    assert quarantines(run) == [(1, (LOST,))]
    flip(data / LOST)
    assert train(tiny_config(data, tmp_path / "whole", data_errors=QUARANTINE)) == result
    audit_run(run)
    assert "b, 32 tokens of padding" in "".join(show_step(run, step, data=data) for step in (6, 7))


def test_too_much_in_quarantine_stops_the_run(data: Path, tmp_path: Path) -> None:
    flip(data / LOST)
    with pytest.raises(
        PreparedDataError, match=rf"{LOST}: .* 31 of 61 train rows, and data_errors.max_share = 0.05 allows only 3;"
    ):
        train(tiny_config(data, tmp_path / "run", data_errors={"policy": "quarantine"}))


@pytest.mark.parametrize("policy", ["stop", "quarantine"])
def test_validation_rows_that_cannot_be_read_follow_the_policy(data: Path, tmp_path: Path, policy: str) -> None:
    config = tiny_config(data, tmp_path / "run", data_errors={"policy": policy, "max_share": 1})
    with after_step(3, lambda: truncate(data / "val/a-00000.arrow")):
        if policy == "stop":
            with pytest.raises(PreparedDataError, match=r"val/a-00000\.arrow"):
                train(config)
            return
        train(config)
    assert quarantines(tmp_path / "run") == [(4, ("val/a-00000.arrow",))]
    assert [event["targets"] > 0 for event in metrics(tmp_path / "run", "eval")] == [True, False, False, False]
    audit_run(tmp_path / "run")


def test_a_run_is_evaluated_without_what_it_had_in_quarantine(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config(
        data, run, data_errors={"policy": "quarantine", "max_share": 1}, checkpoint={"every_steps": 3, "keep_last": 9}
    )
    with after_step(3, lambda: truncate(data / "val/a-00000.arrow")):
        train(config)
    assert quarantines(run) == [(4, ("val/a-00000.arrow",))]
    result = json.loads(evaluate_run(EvaluateOptions(run=run, as_json=True)))
    assert (result["left_out"], result["targets"]) == (9, metrics(run, "eval")[-1]["targets"])
    assert evaluate_run(EvaluateOptions(run=run)).endswith("left out, as in the run: 9 of 9 rows, from shards in quarantine")
    other = write_prepared(tmp_path / "other", seed=5)
    assert json.loads(evaluate_run(EvaluateOptions(run=run, data=other, as_json=True)))["left_out"] == 0
    with pytest.raises(PreparedDataError, match=r"val/a-00000\.arrow"):
        evaluate_run(EvaluateOptions(run=run, checkpoint="3", as_json=True))


def with_token(data: Path, shard: str, token: int) -> None:
    """Rewrite a shard with another token and matching digests, as a faulty writer would."""
    path, manifest = data / shard, read_manifest(data)
    rows = Rows(data, manifest, "train")
    old = rows.read(np.array([len(rows) - 1])).tokens_BL[0].tobytes()
    new = np.frombuffer(old, np.uint16).copy()
    new[3] = token
    path.write_bytes(path.read_bytes().replace(old, new.tobytes()))
    entries = tuple(replace(entry, sha256=digest_file(path)) if entry.path == shard else entry for entry in manifest.shards)
    write_atomic(data / MANIFEST, replace(manifest, shards=entries, root_digest="").sealed()[1])


def test_a_token_beyond_the_vocabulary_never_reaches_the_model(data: Path, tmp_path: Path) -> None:
    vocab_size = read_manifest(data).vocab_size
    with_token(data, LOST, vocab_size)
    with pytest.raises(
        PreparedDataError, match=rf"{LOST}: it contains token {vocab_size}, but the ids of the vocabulary are 0 to {vocab_size - 1}"
    ):
        train(tiny_config(data, tmp_path / "run"))
    train(tiny_config(data, tmp_path / "quarantine", data_errors=QUARANTINE))
    assert [shards for _, shards in quarantines(tmp_path / "quarantine")] == [(LOST,)]


def on_each(group: Group, failing_rank: int, kind: str, *configs: TrainConfig) -> list[str]:
    """Train one run after another on each rank of a group. One rank alone cannot read a shard from the fourth step on."""
    openings.joined_group = lambda *_: nullcontext(group)
    read, broken = Rows.num_targets, [False]

    def reading(rows: Rows, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if broken[0] and group.rank == failing_rank and (number := rows.num_rows_in([LOST], indices)) and not blank(rows):
            assert number
            raise ShardError(LOST, f"{LOST}: damaged") if kind == "shard" else OSError(5, "Input/output error", path)
        return read(rows, indices)

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "num_targets", reading)
        for config in configs:
            path, broken[0] = str(config.data / LOST), False
            with after_step(3, lambda: broken.__setitem__(0, True)):
                try:
                    results.append(train(config))
                except ProjectError as error:
                    results.append(f"{type(error).__name__} {int(exit_code_of(error))}: {error}")
    return results


def blank(rows: Rows) -> bool:
    return bool(rows._blank)


def test_a_rank_that_fails_alone_takes_the_others_with_it_or_along(data: Path, tmp_path: Path) -> None:
    """With one policy all ranks stop with one message. With the other all leave out the same rows, as a single rank does."""
    settings: dict[str, Any] = {"reproducibility": "elastic", "prefetch": 1}
    stop = tiny_config(data, tmp_path / "stop", **settings)
    go_on = tiny_config(data, tmp_path / "go_on", data_errors=QUARANTINE, **settings)
    results = run_ranks(on_each, 2, 1, "shard", stop, go_on, timeout_s=300)
    assert results[0][0] == "RemoteError 3: "
    assert results[1][0] == f"ShardError 3: {LOST}: damaged"
    assert results[0][1] == results[1][1]
    [(step, shards)] = quarantines(tmp_path / "go_on")
    assert shards == (LOST,)
    alone = tmp_path / "alone"
    [[result]] = run_ranks(on_each, 1, 0, "shard", go_on.model_copy(update={"run": alone}), timeout_s=300)
    assert quarantines(alone) == [(step, shards)]
    assert result == results[0][1]
    assert losses(alone) == losses(tmp_path / "go_on")
    assert audit_run(tmp_path / "go_on").quarantined == [LOST]
    events = [entry for entry in read_ledger(tmp_path / "go_on" / LEDGER) if isinstance(entry, LedgerEvent)]
    assert [(event.event, event.model_dump().get("reason")) for event in events[1:]] == [("quarantine", "rank 1 could not read it")]


def test_a_disk_that_fails_on_one_rank_stops_all_with_its_own_exit_code(data: Path, tmp_path: Path) -> None:
    results = run_ranks(on_each, 2, 0, "disk", tiny_config(data, tmp_path / "stop"), timeout_s=300)
    assert results[0][0].startswith(f"StorageError {int(StorageError.exit_code)}: {data / LOST}: input/output error, as ")
    assert results[0][0].endswith("(4 attempts to read it failed)")
    assert results[1][0] == f"RemoteError {int(StorageError.exit_code)}: "


def test_a_shard_whose_digest_is_wrong_is_refused_unless_digests_are_not_checked(data: Path, tmp_path: Path) -> None:
    flip(data / LOST)
    with pytest.raises(PreparedDataError, match="b-00000"):
        train(tiny_config(data, tmp_path / "checked", limits={"steps": 2}))
    assert train(tiny_config(data, tmp_path / "unchecked", limits={"steps": 2}, verify_data=False)).endswith("steps 2")

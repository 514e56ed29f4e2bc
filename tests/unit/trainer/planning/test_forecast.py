"""What a training will do follows from its settings, its data and the time of a step, and fits a terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.config import CheckpointConfig
from trainer.model.decoder import num_weights
from trainer.model.lora import num_adapter_weights
from trainer.model.memory_estimate import estimate
from trainer.planning.checkpoints import DiskSpace, checkpoint_bytes, most_checkpoints
from trainer.planning.forecast import Forecast, brief_lines, plan_lines, time_lines
from trainer.runs.limits import plan_run
from trainer.runs.state import Progress

TRAIN_ROWS, VAL_ROWS = 61, 9


def facts(folder: Path, *, done: Progress | None = None, **changes: Any) -> Forecast:
    data = write_prepared(folder / "data", train_rows=TRAIN_ROWS, val_rows=VAL_ROWS)
    config, manifest = tiny_config(data, folder / "run", **changes), read_manifest(data)
    num_steps = plan_run(config, manifest, TRAIN_ROWS).expected_steps
    memory = estimate(config, manifest.vocab_size, manifest.row_length, 1, 2, (8, 8))
    return Forecast(config, manifest, num_steps, 21_000, TRAIN_ROWS, VAL_ROWS, done or Progress(), memory)


def test_steps_become_epochs_tokens_and_space(tmp_path: Path) -> None:
    found = facts(tmp_path)
    assert (found.num_steps, found.steps_left) == (12, 12)
    assert found.num_epochs(12) == 12 * 8 / TRAIN_ROWS
    in_rows = sum(shard.tokens for shard in found.manifest.shards if shard.split == "train")
    assert found.num_tokens(12) == round(in_rows * 12 * 8 / TRAIN_ROWS)
    assert found.bytes_per_checkpoint == checkpoint_bytes(found.config, found.manifest.vocab_size)
    assert found.num_checkpoints == 3  # steps 5, 10 and 12
    assert found.disk_bytes == 3 * found.bytes_per_checkpoint


def test_checkpoints_share_the_frozen_weights(tmp_path: Path) -> None:
    found, whole = facts(tmp_path, lora={"rank": 2}), facts(tmp_path)
    adapters = num_adapter_weights(found.config.model, found.config.lora)
    frozen = 4 * num_weights(found.config.model, found.manifest.vocab_size)
    assert (found.shared_bytes, whole.shared_bytes) == (frozen, 0)
    assert whole.bytes_per_checkpoint - found.bytes_per_checkpoint == 3 * (frozen - 4 * adapters)
    assert found.disk_bytes == frozen + 3 * found.bytes_per_checkpoint


def test_space_that_the_run_has_taken_already_counts(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/other").write_bytes(bytes(10_000_000))
    found = facts(tmp_path)
    assert found.disk.held == found.disk_bytes == 10_000_000


@pytest.mark.parametrize(
    ("settings", "num_steps", "expected"),
    [
        ({"every_steps": 10}, 1000, 4),  # two newest, the best, and the one that is written
        ({"every_steps": 10}, 0, 4),
        ({"every_steps": 10, "keep_last": 5}, 1000, 7),
        ({"every_steps": 10, "keep_every": 100}, 1000, 14),
        ({"every_steps": 500}, 600, 2),
    ],
)
def test_the_most_checkpoints_at_one_time(settings: dict[str, Any], num_steps: int, expected: int) -> None:
    assert most_checkpoints(CheckpointConfig(**settings), num_steps) == expected


def test_the_time_has_the_evaluations_and_ends_with_the_limit_on_minutes(tmp_path: Path) -> None:
    found = facts(tmp_path)
    evaluation_s = VAL_ROWS / 8 / 3
    assert found.seconds(1.0) == pytest.approx(12 + 5 * evaluation_s)  # before step 1, at steps 4, 8 and 12, and one to spare
    assert found.seconds(2.0) == pytest.approx(2 * found.seconds(1.0))
    resumed = facts(tmp_path, done=Progress(step=8, seconds=30.0))
    assert resumed.seconds(1.0) == pytest.approx(4 + 3 * evaluation_s)
    short = facts(tmp_path, limits={"minutes": 1.0}, done=Progress(step=8, seconds=30.0))
    assert short.seconds(100.0) == 30.0


def test_minutes_alone_become_steps_once_a_step_is_measured(tmp_path: Path) -> None:
    schedule = {"kind": "wsd", "decay_steps": None}
    found = facts(tmp_path, limits={"steps": None, "minutes": 2.0}, schedule=schedule)
    assert found.num_steps == 0
    assert found.seconds(1.0) == 120.0
    assert found.expected_steps(1.0) == 109
    text = " ".join(" ".join(plan_lines(found, place="cpu", free_bytes=1, step_s=1.0)).split())
    assert "length about 109 steps: " in text
    assert "14.3 epochs, until limits.minutes = 2 ends the run" in text
    assert "time about 2 min 00 s for 109 steps, at 1.0 s for each" in text


@pytest.mark.parametrize(
    ("minutes", "done", "length", "time"),
    [
        (1.0, None, "about 54 steps: ", "about 1 min 00 s for 54 steps"),  # the limit comes first
        (1.0, Progress(step=8, seconds=30.0), "about 34 steps, of which 8 are done: ", "about 30 s for 26 steps"),
        (100.0, None, "400 steps: ", "for 400 steps"),  # the steps come first
        (None, None, "400 steps: ", "for 400 steps"),
    ],
)
def test_a_plan_has_the_steps_that_fit_into_the_minutes(
    minutes: float | None, done: Progress | None, length: str, time: str, tmp_path: Path
) -> None:
    found = facts(tmp_path, done=done, limits={"steps": 400, "minutes": minutes}, schedule={"decay_steps": 400})
    text = " ".join(" ".join(plan_lines(found, place="cpu", free_bytes=1, step_s=1.0)).split())
    assert f"length {length}" in text
    assert time in text
    assert ("until limits.minutes = 1 ends the run" in text) == (minutes == 1.0)
    assert time in " ".join(" ".join(time_lines(found, 1.0)).split())


def test_the_plan_fits_a_terminal_of_80_columns_and_24_lines(tmp_path: Path) -> None:
    found = facts(tmp_path, limits={"minutes": 1.0}, done=Progress(step=8))
    found = replace(
        found,
        config=found.config.model_copy(update={"data": Path("/x" * 500)}),
        num_weights=10**12,
        num_train_rows=10**12,
        num_val_rows=10**12,
    )
    vars(found)["disk"] = DiskSpace(10**15, 10**15)
    lines = plan_lines(found, place="cuda, 1024 ranks, float8", free_bytes=10**15, step_s=10.0)
    assert len(lines) <= 24
    assert max(map(len, [*lines, *brief_lines(found), *time_lines(found, 1e9)])) < 80


def test_the_plan_says_what_is_too_small(tmp_path: Path) -> None:
    found, full = facts(tmp_path), facts(tmp_path)
    vars(full)["disk"] = DiskSpace(0, 1)
    lines = " ".join(plan_lines(full, place="cpu", free_bytes=1, step_s=None))
    assert "for each rank, only 1 bytes free" in lines
    assert lines.count("only 1 bytes free") == 2
    assert "not measured: the steps need more memory than one rank has" in lines
    enough = " ".join(plan_lines(found, place="cpu", free_bytes=10**15, step_s=0.25))
    assert "only" not in enough
    assert "for 12 steps, at 250 ms for each, with evaluations" in enough
    assert " ".join(time_lines(found, 0.25)) == f"time        {enough.partition('time        ')[2]}"

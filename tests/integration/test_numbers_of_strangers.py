"""Numbers in a run folder that would start a million processes or use all memory. They are refused, and nothing is left over."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ConfigError, ExitCode
from common.files import digest_file
from common.settings.dotted import to_toml
from tests.support.prepared import write_prepared
from tests.support.records import rewrite_record
from tests.support.replays import replay_run
from tests.support.runs import ROOT, start_ranks, tiny_config
from tests.support.two_ranks import all_ended, descendants, has_ended, seconds_until
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.loop import train
from trainer.model.memory_estimate import most_rows
from trainer.runs.saved_run import SavedRun
from trainer.verification.replay import most_ranks, replay_config

MILLION = 1_000_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    train(tiny_config(data, run, limits={"steps": 4}, eval={"every_steps": 9, "sample_tokens": 0}, checkpoint={"every_steps": 2}))
    return run


@pytest.fixture(scope="module")
def of_two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with so many steps that replaying all of them takes a while."""
    run = tmp_path_factory.mktemp("ranks") / "run"
    config = tiny_config(
        data, run, limits={"steps": 400}, eval={"every_steps": 400, "sample_tokens": 0}, checkpoint={"every_steps": 400}
    )
    assert start_ranks(config, 2).wait(timeout=240) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that would have been started."""
    started: list[Any] = []

    def start(command: Any, *_: Any, **__: Any) -> Any:
        started.append(command)
        raise AssertionError(f"started {command}")

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def rewrite_config(run: Path, **changes: Any) -> None:
    """Change settings and update the digest in the record, as an attacker would who wants to hide the change."""
    settings = SavedRun(run).config.model_dump(mode="json")
    for name, value in changes.items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    (run / "config.toml").write_text(to_toml("train", settings), encoding="utf-8")
    rewrite_record(run, lambda record: record["files"].update({"config.toml": digest_file(run / "config.toml")}))


@pytest.mark.parametrize("claimed", [MILLION, 2**70, 0, -3, "2", 2.0, True, None, [2]])
def test_a_record_that_claims_ranks_that_cannot_be_starts_no_process(run: Path, no_process: list[Any], claimed: object) -> None:
    rewrite_record(run, lambda record: record["environment"].update({"world_size": claimed}))
    with pytest.raises((ConfigError, CheckpointError), match=r"ranks|world_size"):
        replay_run(run, 2)
    assert no_process == []


@pytest.mark.parametrize("claimed", [MILLION, 1000, 2**70, 0, -3, "2", 2.0, True, None])
def test_a_record_that_claims_threads_that_cannot_be_trains_nothing(
    run: Path, no_process: list[Any], claimed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    rewrite_record(run, lambda record: record["identity"].update({"threads": claimed}))
    before = torch.get_num_threads()
    with pytest.raises((ConfigError, CheckpointError), match=r"threads"):
        replay_run(run, 2)
    assert (no_process, torch.get_num_threads()) == ([], before)


def test_as_many_ranks_are_started_as_this_machine_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2)))
    monkeypatch.setattr("common.hardware.available_host_bytes", lambda: 64 << 30)
    assert most_ranks("cpu") == 8
    monkeypatch.setattr("common.hardware.available_host_bytes", lambda: 600 << 20)
    assert most_ranks("cpu") == 2
    monkeypatch.setattr("common.hardware.available_host_bytes", lambda: 0)
    assert most_ranks("cpu") == 1
    assert most_rows(tiny_config(Path("d"), Path("r")).model, 32) == 1


@pytest.mark.parametrize(
    "model", [{"layers": 512, "width": 65536, "heads": 1024}, {"mlp_width": 10**12}, {"vocab_multiple": 1024, "width": 4096}]
)
def test_a_model_that_the_checkpoint_does_not_have_is_not_built(
    run: Path, model: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("the model was built")

    rewrite_config(run, model=model)
    monkeypatch.setattr("trainer.extensions.hooks.build_model", build)
    with pytest.raises(CheckpointError, match="weights, and the checkpoint has"):
        replay_run(run, 2, start=0)


def test_a_model_that_is_larger_than_the_memory_is_not_built(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.training.start.check.check_space", lambda *_: None)
    with pytest.raises(ConfigError, match=r"weights, which take .* of memory are free"):
        train(tiny_config(data, tmp_path / "run", model={"mlp_width": 10**12}))


def test_rows_of_an_evaluation_are_as_many_as_memory_holds(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = evaluate_run(EvaluateOptions(run=run, as_json=True))
    sizes = []

    def forward(*arguments: Any, **options: Any) -> Any:
        sizes.append(len(arguments[1].tokens))
        return forward_pass(*arguments, **options)

    from trainer.evaluation.evaluate import forward_pass  # noqa: PLC0415 - the name is replaced there

    monkeypatch.setattr("trainer.evaluation.evaluate.forward_pass", forward)
    monkeypatch.setattr("common.hardware.available_host_bytes", lambda: 1 << 18)
    rewrite_config(run, eval={"micro_batch_size": 65536})
    assert evaluate_run(EvaluateOptions(run=run, as_json=True)) == usual
    assert max(sizes) == 2, "more than 2 of 9 rows in one pass"


def test_a_replay_reads_no_more_batches_ahead_than_it_needs(run: Path, tmp_path: Path) -> None:
    rewrite_config(run, prefetch=64)
    assert replay_config(SavedRun(run).config, SavedRun(run).record.identity, tmp_path, 3, ()).prefetch == 2


@pytest.mark.parametrize(("name", "value"), [("schedule.decay_steps", "x"), ("schedule.decay_steps", -1), ("threads", 5000)])
def test_an_identity_that_no_run_can_have_is_refused(run: Path, tmp_path: Path, name: str, value: object) -> None:
    identity = SavedRun(run).record.identity | {name: value}
    with pytest.raises(CheckpointError, match=re.escape(name)):
        replay_config(SavedRun(run).config, identity, tmp_path, 3, ())


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_replay_that_is_interrupted_leaves_no_process(of_two_ranks: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "trainer", "verify", str(of_two_ranks), "--level", "integrity", "--replay", "400"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            seconds_until(lambda: list(tmp_path.glob("replay-*/run/heartbeat/rank-1")) or process.poll() is not None, 120)
            started = descendants(process.pid)
            assert len(started) >= 3, (tmp_path / "log").read_text()
            process.send_signal(number)
            code = process.wait(60)
            seconds_until(lambda: all_ended(started), 20)
        finally:
            for pid in (process.pid, *descendants(process.pid)):
                if not has_ended(pid):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    if number != signal.SIGKILL:
        assert code == {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.STOPPED}[number]
        assert not list(tmp_path.glob("replay-*"))
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_two_ranks_are_replayed(of_two_ranks: Path) -> None:
    replay = replay_run(of_two_ranks, 3, start=0)
    assert (replay.num_ranks, replay.difference) == (2, "")

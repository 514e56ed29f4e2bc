"""Whole training runs on small prepared data: they learn, end, resume, and refuse settings that do not match."""

import json
import logging
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ConfigError, ExitCode, GuardError, PreparedDataError, StoppedBySignal
from tests.support.prepared import write_prepared
from tests.support.replays import verify_run
from tests.support.runs import losses, metrics, run_command, start_ranks, start_torchrun, tiny_config, wait_for_step
from tests.support.two_ranks import log, start_entrypoint, started
from trainer import loop
from trainer.checkpoint.of_run import load_checkpoint
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.evaluation import evaluate as evaluations
from trainer.loop import train
from trainer.optim.adamw import Optimizer
from trainer.runs.saved_run import SavedRun
from trainer.training import training_run
from trainer.training.start import open as opening
from trainer.verification import replay


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    return run, train(tiny_config(data, run))


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process get SIGTERM during the given step."""
    original = loop.train_step

    def stepping(trainable: Any, batch: Any, inputs: Any, **settings: Any) -> Any:
        seen.append(1)
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGTERM)
            inputs = replace(inputs, stop_requested=True)
        return original(trainable, batch, inputs, **settings)

    seen: list[int] = []
    monkeypatch.setattr(loop, "train_step", stepping)


def test_training_lowers_the_validation_loss_and_leaves_a_complete_run(uninterrupted: tuple[Path, str]) -> None:
    run, result = uninterrupted
    evaluations = metrics(run, "eval")
    assert [event["step"] for event in evaluations] == [0, 4, 8, 12]
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"] - 0.5
    trained = [event["loss"] for event in metrics(run, "train")]
    assert [event.get("train_loss") for event in evaluations] == [None, *(sum(trained[n : n + 4]) / 4 for n in (0, 4, 8))]
    assert evaluations[-1]["gap"] == evaluations[-1]["val_loss"] - evaluations[-1]["train_loss"]
    assert ["trend_per_1000_steps" in event for event in evaluations] == [False, False, True, True]
    assert evaluations[-1]["trend_per_1000_steps"] < -1
    assert [step for step, _ in losses(run)] == list(range(1, 13))
    assert result.startswith("weights sha256:")
    assert result.endswith("steps 12")
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["step"]) == ("finished", 12)
    assert record["weights"] in result
    assert {"config.toml", "tokenizer", "tensorboard", "metrics.jsonl", "heartbeat"} <= {path.name for path in run.iterdir()}


def test_a_run_in_the_folder_of_its_data_is_refused_and_the_data_stays(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "both")
    before = {path: path.read_bytes() for path in (tmp_path / "both").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="run and data are the same folder"):
        train(tiny_config(tmp_path / "both", tmp_path / "both"))
    assert {path: path.read_bytes() for path in (tmp_path / "both").rglob("*") if path.is_file()} == before


def test_the_same_run_again_gives_the_same_bits(data: Path, tmp_path: Path, uninterrupted: tuple[Path, str]) -> None:
    run, result = uninterrupted
    assert train(tiny_config(data, tmp_path / "again")) == result
    assert losses(tmp_path / "again") == losses(run)


def test_another_seed_gives_another_run(data: Path, tmp_path: Path, uninterrupted: tuple[Path, str]) -> None:
    assert train(tiny_config(data, tmp_path / "other", seed=2)) != uninterrupted[1]


@pytest.mark.parametrize("stops", [[1], [4], [5, 9, 12], [3, 6, 7, 8, 11]])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(
    data: Path, tmp_path: Path, uninterrupted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, stops: list[int]
) -> None:
    run, done = tmp_path / "stopped", 0
    for stop in stops:
        with monkeypatch.context() as patch:
            stop_after(stop - done, patch)
            with pytest.raises(StoppedBySignal, match=f"saved step {stop}"):
                train(tiny_config(data, run))
        done = stop
    assert train(tiny_config(data, run)) == uninterrupted[1]
    assert losses(run) == losses(uninterrupted[0])
    assert [(event["step"], event["val_loss_hex"]) for event in metrics(run, "eval")] == [
        (event["step"], event["val_loss_hex"]) for event in metrics(uninterrupted[0], "eval")
    ]


def test_a_run_killed_without_warning_repeats_only_what_was_not_saved(
    data: Path, tmp_path: Path, uninterrupted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "killed"
    original, steps = loop.train_step, []

    def stepping(*args: object, **kwargs: object) -> object:
        steps.append(1)
        if len(steps) == 8:
            raise KeyboardInterrupt  # as abrupt as possible within one process: nothing is saved or cleaned up
        return original(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stepping)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(data, run))
    assert CheckpointStore(run / "checkpoints").steps()[-1] == 5
    assert train(tiny_config(data, run)) == uninterrupted[1]
    assert losses(run) == losses(uninterrupted[0])


def test_the_watchdog_watches_a_rank_while_its_model_is_built(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, heartbeats = opening.built_and_restored, list[bool]()

    def building(*arguments: Any) -> Any:
        heartbeats.append((tmp_path / "run/heartbeat/rank-0").exists())
        return build(*arguments)

    monkeypatch.setattr(opening, "built_and_restored", building)
    train(tiny_config(data, tmp_path / "run", limits={"steps": 1}))
    assert heartbeats == [True]


def test_a_finished_run_is_not_trained_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(data, tmp_path / "finished")
    result = train(config)
    monkeypatch.setattr(loop, "train_step", lambda *_args, **_kwargs: pytest.fail("a step was made"))
    assert train(config) == result


def test_accumulation_does_not_change_the_mathematics(data: Path, tmp_path: Path) -> None:
    """Rows have different numbers of targets, so a mean of the means of micro-batches would differ."""
    runs = []
    for micro in (1, 2, 8):
        run = tmp_path / f"micro-{micro}"
        train(tiny_config(data, run, batch={"global_batch_size": 8, "micro_batch_size": micro}, limits={"steps": 6}))
        runs.append([event["loss"] for event in metrics(run, "train")])
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert runs[2] == pytest.approx(runs[0], rel=1e-5)


def test_accumulation_is_over_targets_not_over_micro_batches(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above can fail: with another normalization the losses differ by more than its tolerance."""
    train(tiny_config(data, tmp_path / "right", limits={"steps": 3}))
    monkeypatch.setattr(
        "trainer.model.forward.linear_cross_entropy_sum",
        lambda hidden, weight, targets, *_, **__: (
            torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), ignore_index=-100) * 60
        ),
    )
    train(tiny_config(data, tmp_path / "wrong", limits={"steps": 3}))
    right, wrong = ([event["loss"] for event in metrics(tmp_path / name, "train")] for name in ("right", "wrong"))
    assert wrong != pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize(
    "limits", [{"steps": None, "epochs": 1.5}, {"steps": None, "tokens": 1500}, {"steps": 50, "minutes": 1e-9}]
)
def test_the_first_limit_ends_the_run(data: Path, tmp_path: Path, limits: dict[str, float | None]) -> None:
    run = tmp_path / "limited"
    train(tiny_config(data, run, limits=limits))
    last = metrics(run, "train")[-1]
    expected = {
        "epochs": 12,
        "tokens": next(e["step"] for e in metrics(run, "train") if e["tokens"] >= 1500) if "tokens" in limits else 0,
    }
    assert last["step"] == (expected["epochs"] if "epochs" in limits else expected["tokens"] if "tokens" in limits else 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_learns_too_and_resumes_exactly(
    data: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(tiny_config(data, tmp_path / "whole", precision=precision))
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        with pytest.raises(StoppedBySignal):
            train(tiny_config(data, tmp_path / "stopped", precision=precision))
    assert train(tiny_config(data, tmp_path / "stopped", precision=precision)) == result
    evaluations = metrics(tmp_path / "whole", "eval")
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"] - 0.3


def test_weights_that_are_not_finite_are_never_saved(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = training_run.set_learning_rate

    def poison(optimizers: tuple[Optimizer, ...], factor: float, *others: float, decay_factor: float) -> None:
        original(optimizers, factor, *others, decay_factor=decay_factor)
        if factor == pytest.approx(1, rel=1e-3):
            with torch.no_grad():
                optimizers[0].param_groups[0]["params"][0][0] = float("nan")

    monkeypatch.setattr(training_run, "set_learning_rate", poison)
    with pytest.raises(GuardError, match="is not finite, so nothing is saved"):
        train(tiny_config(data, tmp_path / "poisoned", checkpoint={"every_steps": 1}))
    newest = load_checkpoint(SavedRun(tmp_path / "poisoned"), "latest")
    assert all(torch.isfinite(tensor).all() for tensor in newest.model.values())


def test_two_ranks_train_stop_together_and_resume_exactly(data: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    long = {"limits": {"steps": 200}, "eval": {"every_steps": 100}, "checkpoint": {"every_steps": 75}}
    exit_file = tmp_path / "exit"
    assert start_ranks(tiny_config(data, whole, **long), 2).wait(timeout=240) == 0

    process = start_torchrun(tiny_config(data, stopped, **long), 2, TRAINER_EXIT_FILE=str(exit_file))
    wait_for_step(stopped, 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    assert exit_file.read_text() == f"{int(ExitCode.STOPPED)}\n"
    saved = CheckpointStore(stopped / "checkpoints").newest_verified()
    assert saved is not None
    assert saved == metrics(stopped, "train")[-1]["step"] < 200

    assert start_ranks(tiny_config(data, stopped, **long), 2).wait(timeout=240) == 0
    assert losses(stopped) == losses(whole)
    first_line = whole.with_suffix(".log").read_text()
    assert first_line.count("weights sha256:") == 1
    assert first_line.splitlines()[-1].split()[:2] == stopped.with_suffix(".log").read_text().splitlines()[-1].split()[:2]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": {"context": 16}}, ConfigError, "have 32 tokens, but model.context = 16; raise model.context, or prepare with"),
        (
            {"schedule": {"warmup_steps": 12}},
            ConfigError,
            "schedule.warmup_steps = 12, but the learning rate must reach its floor at step 12",
        ),
        ({"data": Path("/nowhere")}, PreparedDataError, "/nowhere/manifest.json"),
        ({"device": "cuda"}, ConfigError, "device = cuda, but torch sees no GPU"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(
    data: Path, tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(error, match=message):
        train(tiny_config(data, tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "record.json").exists()


SIGTERM_AT_THE_BIRTH_OF_A_RANK = """
import os, signal, sys, time

spawn, ranks = os.posix_spawn, []

def posix_spawn(path, args, *others, **named):
    ranks.append(spawn(path, args, *others, **named))
    if len(ranks) == {number}:
        os.kill(os.getppid(), signal.SIGTERM)  # the entrypoint, which passes it on
        time.sleep(0.5)
    return ranks[-1]

if any(word.endswith("launch.torchrun") for word in sys.orig_argv):
    os.posix_spawn = posix_spawn
"""


@pytest.mark.parametrize("number", [1, 2])
def test_a_stop_while_the_ranks_are_started_is_a_stop_and_no_crash(data: Path, tmp_path: Path, number: int) -> None:
    config = tiny_config(data, tmp_path / "run")
    (tmp_path / "sitecustomize.py").write_text(SIGTERM_AT_THE_BIRTH_OF_A_RANK.format(number=number))
    begun = start_entrypoint(config, PYTHONPATH=str(tmp_path))
    assert begun.wait(60) == ExitCode.STOPPED, log(config)
    with started(config) as again:
        assert again.wait(60) == ExitCode.DONE, log(config)


def test_a_run_of_another_configuration_is_refused_with_the_way_to_go_on(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(data, run, limits={"steps": 5}))
    changed = {"optim": {"lr": 1e-3}, "limits": {"steps": 12}}
    with pytest.raises(ConfigError, match=r"optim.lr was 0.003 and is 0.001. .*--resume.allow_changes optim.lr"):
        train(tiny_config(data, run, **changed))
    assert train(tiny_config(data, run, **changed, resume={"allow_changes": ["optim.lr"]})).endswith("steps 12")


def test_a_run_is_not_moved_unnoticed_to_a_processor_that_gives_other_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, moved = tmp_path / "run", {"device": "cpu", "limits": {"steps": 12}}
    train(tiny_config(data, run, device="cpu", limits={"steps": 5}))
    (tmp_path / "cpuinfo").write_text("vendor_id\t: Another\n")
    monkeypatch.setattr("trainer.machine.environment._CPUINFO", tmp_path / "cpuinfo")
    with pytest.raises(ConfigError, match=r"device was cpu, \S.* and is cpu, Another .*--resume.allow_changes device"):
        train(tiny_config(data, run, **moved))
    assert train(tiny_config(data, run, **moved, resume={"allow_changes": ["device"]})).endswith("steps 12")


def test_what_is_not_as_it_was_at_the_start_before_is_told_and_kept_in_the_record(
    data: Path, tmp_path: Path, uninterrupted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"

    def told(code: str, steps: int | None = None, **changes: Any) -> str:
        """Start with this code, and return the messages about the previous start."""
        caplog.clear()
        changes["checkpoint"] = {"keep_last": 20}
        with monkeypatch.context() as patch:
            patch.setenv("CODE_REVISION", code)
            if steps is None:
                assert train(tiny_config(data, run, **changes)) == uninterrupted[1]
            else:
                stop_after(steps, patch)
                with pytest.raises(StoppedBySignal):
                    train(tiny_config(data, run, **changes))
        return "\n".join(message for message in caplog.messages if "differences from the previous start" in message)

    def lose(*steps: int) -> None:
        for step in steps:
            shutil.rmtree(CheckpointStore(run / "checkpoints").path(step))

    def earlier() -> object:
        return json.loads((run / "record.json").read_bytes())["earlier"]

    caplog.set_level(logging.INFO)
    assert told("a", 3) == ""
    assert earlier() == []
    assert told("b", 4, eval={"sample_tokens": 5}) == (
        "resumed at step 3 with differences from the previous start (* can change the results):\n"
        "  * code: a before, b now\n"
        "    eval.sample_tokens: 4 before, 5 now"
    )
    assert earlier() == [{"until": 3, "was": {"code": "a"}}], "recorded a setting that changes no bits"
    lose(7)
    assert told("c", 1, eval={"sample_tokens": 5}).startswith("resumed at step 5 with ")
    assert earlier() == [{"until": 3, "was": {"code": "a"}}, {"until": 5, "was": {"code": "b"}}]
    lose(6, 5)
    assert told("c", 1, eval={"sample_tokens": 5}) == ""
    assert earlier() == [{"until": 3, "was": {"code": "a"}}, {"until": 4, "was": {"code": "b"}}], "step 5 was repeated"
    (run / "config.toml").write_text("no settings")
    assert told("c") == ""
    assert earlier() == [{"until": 3, "was": {"code": "a"}}, {"until": 4, "was": {"code": "b"}}]
    monkeypatch.setenv("CODE_REVISION", "c")
    *_, environment = verify_run(run)
    assert "as recorded\n  up to step 3 the run had another code (" in environment.text
    monkeypatch.setattr(replay, "first_difference", lambda *_: "some tensor differs")
    with pytest.raises(CheckpointError, match=r"some tensor differs\n  up to step 4 the run had another code ") as caught:
        list(verify_run(run, num_steps=2, start=3))
    assert "up to step 3" not in str(caught.value), "named code whose steps were not replayed"


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("ema.decay", {"ema": {"decay": 0.9}}),
        ("model.layers", {"model": {"layers": 3}}),
        ("model.width", {"model": {"width": 64}}),
        ("model.tie_embeddings", {"model": {"tie_embeddings": False}}),
    ],
)
def test_settings_that_the_checkpoint_does_not_fit_leave_the_run_as_it_was(
    data: Path,
    tmp_path: Path,
    setting: str,
    changes: dict[str, object],
    uninterrupted: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(StoppedBySignal):
            train(tiny_config(data, run))
    before = {name: (run / name).read_bytes() for name in ("record.json", "config.toml", "metrics.jsonl", "ledger/steps.jsonl")}
    with pytest.raises(CheckpointError, match="continue with the settings that wrote it"):
        train(tiny_config(data, run, **changes, resume={"allow_changes": [setting]}))
    assert {name: (run / name).read_bytes() for name in before} == before
    assert train(tiny_config(data, run)) == uninterrupted[1]


def test_a_run_can_go_on_in_fp16_that_was_not_begun_in_it(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(data, run, limits={"steps": 5}))
    changed = {"precision": "fp16", "resume": {"allow_changes": ["precision"]}}
    assert train(tiny_config(data, run, **changed)).endswith("steps 12")


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_over_its_history(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train(tiny_config(data, run))
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match="steps up to 12 were saved, and no checkpoint is there any more; put `checkpoints` back"
    ):
        train(tiny_config(data, run))
    assert (run / "metrics.jsonl").read_bytes() == before
    (tmp_path / "elsewhere").rename(run / "checkpoints")
    assert train(tiny_config(data, run)) == result


def test_an_evaluation_that_no_checkpoint_knows_of_is_recorded_once(
    data: Path, tmp_path: Path, uninterrupted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes in step 8. Two later starts evaluate this step, and both die in the next step."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(8, patch)
        with pytest.raises(StoppedBySignal):
            train(tiny_config(data, run))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", lambda *_args, **_settings: {}["dead"])
            with pytest.raises(KeyError):
                train(tiny_config(data, run))
    assert train(tiny_config(data, run)) == uninterrupted[1]
    for kind in ("eval", "sample", "scores"):
        assert [event["step"] for event in metrics(run, kind)] == [event["step"] for event in metrics(uninterrupted[0], kind)]


@pytest.mark.parametrize("stopped_at", [0, 8, 12])
def test_a_stop_during_an_evaluation_does_not_wait_for_its_end_and_the_run_evaluates_when_it_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int
) -> None:
    many = {"eval": {"every_steps": 4, "micro_batch_size": 1, "sample_tokens": 4}}
    whole, run, passes = tmp_path / "whole", tmp_path / "run", []
    result = train(tiny_config(write_prepared(tmp_path / "data", val_rows=40), whole, **many))
    original = evaluations.forward_pass

    def passing(*args: object, **kwargs: object) -> object:
        passes.append(1)
        if len(passes) == 40 * stopped_at // 4 + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "forward_pass", passing)
        with pytest.raises(StoppedBySignal, match=f"saved step {stopped_at} "):
            train(tiny_config(tmp_path / "data", run, **many))
    assert len(passes) <= 40 * stopped_at // 4 + 8
    assert [event["step"] for event in metrics(run, "eval", "sample")][-1:] != [stopped_at]
    assert train(tiny_config(tmp_path / "data", run, **many)) == result
    assert losses(run) == losses(whole)
    for kind, number in (("eval", "val_loss_hex"), ("sample", "text")):
        assert [(one["step"], one[number]) for one in metrics(run, kind)] == [
            (one["step"], one[number]) for one in metrics(whole, kind)
        ]


def test_data_of_another_digest_is_refused_whatever_is_allowed(data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, tmp_path / "run", limits={"steps": 5}))
    other = write_prepared(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"was trained on the data sha256:"):
        train(tiny_config(other, tmp_path / "run", resume={"allow_changes": ["data"]}))


def test_a_changed_byte_in_a_shard_is_named(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    shard = data / "train" / "b-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    with pytest.raises(PreparedDataError, match=r"train/b-00000\.arrow"):
        train(tiny_config(data, tmp_path / "run"))


def test_a_second_trainer_is_kept_out(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_ranks(tiny_config(data, run, limits={"steps": 100_000}, eval={"every_steps": 50_000}), 1)
    try:
        wait_for_step(run, 1)
        with pytest.raises(ConfigError, match=r"process .* is training here"):
            train(tiny_config(data, run))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def test_damaged_checkpoints_are_stepped_over_but_never_all_of_them(
    data: Path, tmp_path: Path, uninterrupted: tuple[Path, str]
) -> None:
    run = tmp_path / "run"
    config = tiny_config(data, run, checkpoint={"every_steps": 5, "keep_last": 3})
    train(config)
    store = CheckpointStore(run / "checkpoints")
    (store.path(12) / "manifest.json").write_bytes(b"")
    assert train(config) == uninterrupted[1]
    for step in store.steps():
        (store.path(step) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        train(config)


def test_evaluate_repeats_the_last_validation_exactly(uninterrupted: tuple[Path, str]) -> None:
    run, _ = uninterrupted
    result = json.loads(evaluate_run(EvaluateOptions(run=run, as_json=True)))
    assert result["val_loss"] == metrics(run, "eval")[-1]["val_loss"]
    assert json.loads(evaluate_run(EvaluateOptions(run=run, checkpoint="best", as_json=True)))["val_loss"] == min(
        event["val_loss"] for event in metrics(run, "eval")
    )


def test_commands_answer_mistakes_in_one_line_with_the_documented_exit_code(
    tmp_path: Path, uninterrupted: tuple[Path, str]
) -> None:
    run, _ = uninterrupted
    for words, code, message in (
        (("trainer", "evaluate", str(tmp_path)), ExitCode.CHECKPOINT, "no config.toml"),
        (("trainer", "generate", str(run), "--checkpoint", "7"), ExitCode.CHECKPOINT, "no checkpoint of step 7; there are:"),
        (("trainer", "generate", str(run), "--temperature", "-1"), ExitCode.CONFIG, "--temperature = '-1': input should be"),
        (("trainer", "train", "--data", str(tmp_path), "--run", "r", "--limits.steps", "1"), ExitCode.DATA, "manifest.json"),
        (("trainer", "trian"), ExitCode.CONFIG, "the commands are train"),
        (("trainer", "generate"), ExitCode.CONFIG, "no run is named"),
    ):
        outcome = run_command(*words)
        assert outcome.returncode == code, outcome.stderr
        assert message in outcome.stderr
        assert len(outcome.stderr.strip().splitlines()) == 1


def test_generate_continues_a_prompt_the_same_way_for_the_same_seed(uninterrupted: tuple[Path, str]) -> None:
    words = ("trainer", "generate", str(uninterrupted[0]), "--prompt", "the cat", "--max_tokens", "12", "--seed", "4")
    first, again = run_command(*words), run_command(*words)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("the cat")
    assert len(first.stdout) > len("the cat\n")
    assert first.stdout == again.stdout


def test_an_error_that_all_ranks_meet_is_told_once(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", model={"context": 16})
    assert start_torchrun(config, 2, TRAINER_EXIT_FILE=str(tmp_path / "exit")).wait(timeout=120) != 0
    assert (tmp_path / "exit").read_text() == f"{int(ExitCode.CONFIG)}\n"
    assert config.run.with_suffix(".log").read_text().count("error: ") == 1


def test_an_error_of_rank_0_is_told_once_and_ends_every_rank_with_its_code(data: Path, tmp_path: Path) -> None:
    run, exit_file = tmp_path / "run", tmp_path / "exit"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")  # only rank 0 looks for checkpoints; it finds no folder
    process = start_torchrun(tiny_config(data, run), 2, TRAINER_EXIT_FILE=str(exit_file))
    assert process.wait(timeout=120) != 0
    assert exit_file.read_text() == f"{int(ExitCode.CHECKPOINT)}\n"
    log = run.with_suffix(".log").read_text()
    assert log.count("error: ") == 1
    assert "checkpoints" in log


def test_three_ranks_resume_exactly(data: Path, tmp_path: Path) -> None:
    """Here the order of addition matters. Without the pass over an empty batch in `wrap_for_training`, step 15 differs."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    changes = {
        "batch": {"global_batch_size": 12},
        "model": {"width": 64},
        "schedule": {"decay_steps": 24},
        "checkpoint": {"every_steps": 100},
    }
    assert start_ranks(tiny_config(data, whole, limits={"steps": 24}, **changes), 3).wait(timeout=240) == 0
    for steps in (12, 24):
        assert start_ranks(tiny_config(data, resumed, limits={"steps": steps}, **changes), 3).wait(timeout=240) == 0
    assert losses(resumed) == losses(whole)

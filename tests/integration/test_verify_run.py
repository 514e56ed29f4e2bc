"""`verify` and `audit` on whole runs: changes are named, unchanged parts are proven, and replayed steps give the same bits."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ExitCode, PreparedDataError, ProjectError
from common.files import digest_file, sealed, unsealed
from common.settings.dotted import to_toml
from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.replays import replay_run, verify_run
from tests.support.runs import metrics, run_command, start_ranks, tiny_config
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.loop import train
from trainer.machine import environment
from trainer.machine.environment import ChangedFact, environment_facts
from trainer.runs.layout import LEDGER
from trainer.runs.saved_run import SavedRun
from trainer.training.step import train_step
from trainer.verification.audit import audit_run, show_step
from trainer.verification.verify import Outcome, check_integrity, compare_environment

KEEP_ALL: dict[str, Any] = {"checkpoint": {"every_steps": 4, "keep_last": 10}}

PARAGRAPHS: dict[str, Any] = {
    "row_length": 32,
    "text": {"documents": "paragraphs"},
    "dedup": {"near": False},
    "split": {"val_fraction": 0.2},
    "tokenizer": {"kind": "byte"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with checkpoints at 4, 8 and 12. Tests change only copies."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    train(tiny_config(data, run, **KEEP_ALL))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def flip_bit(path: Path, place: float = 0.5) -> Path:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)
    return path


def write_text(folder: Path, before: str = "") -> Path:
    """Write two files of paragraphs that all differ."""
    folder.mkdir()
    for name in ("one", "two"):
        paragraphs = [f"{before}The {name} text number {number} says {number * number} words to nobody." for number in range(60)]
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs))
    return folder


def prepared(text: Path, output: Path) -> Path:
    prepare(PrepareConfig(sources=(str(text),), output=output, workers=1, **PARAGRAPHS))
    return output


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the training abruptly during the given step: nothing is saved or cleaned up."""
    seen: list[int] = []

    def stepping(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == step:
            raise KeyboardInterrupt
        return train_step(*args, **kwargs)

    monkeypatch.setattr("trainer.loop.train_step", stepping)


def held(outcomes: Any) -> dict[str, Outcome]:
    return {outcome.level: outcome for outcome in outcomes}


def reseal(run: Path) -> None:
    """Update the digests in the record, as an attacker would who wants to hide a change."""
    record = record_of(run)
    record["files"] = {name: digest_file(run / name) for name in record["files"]}
    (run / "record.json").write_bytes(sealed(record))


def test_an_untouched_run_is_proven_up_to_the_bits_of_its_steps(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    outcomes = held(verify_run(run, level="environment", num_steps=5))
    assert list(outcomes) == ["integrity", "environment", "replay"]
    assert outcomes["environment"].facts["differences"] == []
    assert "bitwise equal: 5 steps (5 to 9); every tensor at step 8" in outcomes["replay"].text
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("start", "num_steps", "compared"), [(0, 12, (4, 8, 12)), (8, 4, (12,)), (4, 3, ())])
def test_steps_are_replayed_from_any_checkpoint(run: Path, start: int, num_steps: int, compared: tuple[int, ...]) -> None:
    replay = replay_run(run, num_steps, start=start)
    assert (replay.start, replay.end, replay.tensors_at, replay.difference) == (start, start + num_steps, compared, "")


def test_evaluations_that_only_the_replay_makes_do_not_end_it(data: Path, tmp_path: Path) -> None:
    """The replay evaluates at every checkpoint. In a step or two the loss improves less than between evaluations of the run."""
    run = tmp_path / "run"
    settings: dict[str, Any] = {"every_steps": 5, "patience": 1, "min_delta": 0.05}
    train(tiny_config(data, run, limits={"steps": 15}, eval=settings, checkpoint={"every_steps": 1, "keep_last": 8}))
    assert record_of(run)["ended_by"] == "limits.steps"
    replay = replay_run(run, 5, start=10)
    assert (replay.tensors_at, replay.difference) == ((11, 12, 13, 14, 15), "")


def test_a_run_that_went_on_with_other_evaluations_is_replayed(data: Path, tmp_path: Path) -> None:
    """The replay makes neither the evaluation at the first end of the run nor those of an earlier interval."""
    run = tmp_path / "run"
    for num_steps, interval in ((5, 4), (10, 3)):
        train(tiny_config(data, run, limits={"steps": num_steps}, eval={"every_steps": interval}, checkpoint={"keep_last": 1}))
    assert [event["step"] for event in metrics(run, "eval")] == [0, 4, 5, 6, 9, 10]
    assert replay_run(run, 10, start=0).difference == ""
    path = run / "metrics.jsonl"
    event = metrics(run, "eval")[-2]
    better = event | {"val_loss": 1.0, "val_loss_hex": (1.0).hex()}
    path.write_text(path.read_text().replace(json.dumps(event), json.dumps(better)))
    assert replay_run(run, 10, start=0).difference.startswith("step 9 is the first that differs: val_loss_hex was 0x1.0")


CHANGES: dict[str, tuple[Callable[[Path, Path], Path], type[ProjectError]]] = {
    "shard": (lambda _, data: flip_bit(data / "train" / "b-00000.arrow"), PreparedDataError),
    "validation": (lambda _, data: flip_bit(data / "val" / "a-00000.arrow"), PreparedDataError),
    "manifest": (lambda _, data: flip_bit(data / "manifest.json"), PreparedDataError),
    "tensors": (lambda run, _: flip_bit(sorted((run / "checkpoints" / "objects").iterdir())[0]), CheckpointError),
    "checkpoint": (lambda run, _: flip_bit(run / "checkpoints" / "step-00000008" / "manifest.json"), CheckpointError),
    "record": (lambda run, _: flip_bit(run / "record.json"), CheckpointError),
    "config": (lambda run, _: flip_bit(run / "config.toml"), CheckpointError),
    "tokenizer": (lambda run, _: flip_bit(next((run / "tokenizer").iterdir())), CheckpointError),
    "metrics": (lambda run, _: flip_bit(run / "metrics.jsonl"), CheckpointError),
    "last metric": (lambda run, _: flip_bit(run / "metrics.jsonl", 0.9999), CheckpointError),
    "ledger": (lambda run, _: flip_bit(run / LEDGER), CheckpointError),
    "end of the ledger": (lambda run, _: flip_bit(run / LEDGER, 0.9999), CheckpointError),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_one_changed_bit_anywhere_is_found_and_its_file_named(run: Path, data: Path, tmp_path: Path, change: str) -> None:
    copied = shutil.copytree(data, tmp_path / "data")
    check_integrity(SavedRun(run), copied)
    do, expected = CHANGES[change]
    changed = do(run, copied)
    with pytest.raises(expected) as caught:
        check_integrity(SavedRun(run), copied)
    assert str(changed) in str(caught.value)


@pytest.mark.parametrize("name", ["record.json", "config.toml", "metrics.jsonl", str(LEDGER), "checkpoints/step-00000004"])
def test_a_missing_file_is_named(run: Path, name: str) -> None:
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
        check_integrity(SavedRun(run))


def test_other_data_is_named_and_moved_data_is_found(run: Path, data: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(data, tmp_path / "moved")
    assert check_integrity(SavedRun(run), moved).data_files == 3
    assert replay_run(run, 2, data=moved).difference == ""
    other = write_prepared(tmp_path / "other", seed=5)
    for check in (lambda run, data=None: check_integrity(SavedRun(run), data), audit_run):
        with pytest.raises(PreparedDataError, match="--data"):
            check(run, other)


def test_data_that_is_not_where_the_run_names_it_is_asked_for(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings keep a relative path as given. From another directory it leads to another place."""
    settings = (run / "config.toml").read_text()
    assert str(data) in settings
    (run / "config.toml").write_text(settings.replace(str(data), data.name))
    reseal(run)
    monkeypatch.chdir(data.parent)
    check_integrity(SavedRun(run))
    monkeypatch.chdir(tmp_path)
    looks: list[Callable[..., object]] = [
        lambda run, data=None: check_integrity(SavedRun(run), data),
        audit_run,
        partial(replay_run, num_steps=2),
    ]
    looks += [partial(show_step, step=3), lambda run, data=None: evaluate_run(EvaluateOptions(run=run, data=data))]
    for look in looks:
        with pytest.raises(
            PreparedDataError, match=rf"looked for in {tmp_path / data.name}, .* from where it was trained; .* --data"
        ):
            look(run)
        look(run, data=data)


def test_as_many_steps_are_replayed_as_there_are(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(data, run, limits={"steps": 5}, checkpoint={"every_steps": 4}))
    whole = replay_run(run, None)
    assert (whole.start, whole.end, whole.difference) == (0, 5, "")
    last = replay_run(run, None, start=4)
    assert (last.start, last.end, last.difference) == (4, 5, "")


def test_a_changed_weight_whose_digests_were_made_right_again_is_found_by_replay(run: Path) -> None:
    store = CheckpointStore(run / "checkpoints")
    checkpoint = store.load(4)
    name = min(checkpoint.model)
    weights = {key: tensor.clone() for key, tensor in checkpoint.model.items()}
    weights[name].view(-1)[0] += 1e-3
    store.save(replace(checkpoint, model=weights))
    reseal(run)
    check_integrity(SavedRun(run))
    with pytest.raises(
        CheckpointError, match=rf"step 5 is the first that differs: loss_hex was .*; at step 8 tensor model/{name} "
    ):
        held(verify_run(run, level="integrity", num_steps=5, start=4))
    assert replay_run(run, 4, start=0).difference.startswith(f"at step 4 tensor model/{name} differs by up to 0.001")


def test_a_changed_moment_is_found_where_it_first_matters(run: Path) -> None:
    store = CheckpointStore(run / "checkpoints")
    checkpoint = store.load(8)
    name = min(checkpoint.optimizer)
    moments = {key: tensor.clone() for key, tensor in checkpoint.optimizer.items()}
    moments[name].view(-1)[0] = 1.0
    store.save(replace(checkpoint, optimizer=moments))
    assert replay_run(run, 5, start=4).difference.startswith(f"at step 8 tensor optimizer/{name} differs by up to ")


def test_a_loss_that_was_never_reached_is_found_by_replay(run: Path) -> None:
    path = run / "metrics.jsonl"
    event = metrics(run, "train")[6]
    better = event | {"loss": event["loss"] / 2, "loss_hex": (event["loss"] / 2).hex()}
    path.write_text(path.read_text().replace(json.dumps(event), json.dumps(better)))
    reseal(run)
    with pytest.raises(CheckpointError, match="step 7 is the first that differs: loss_hex"):
        held(verify_run(run, level="integrity", num_steps=8, start=4))


def test_other_flags_are_listed_and_named_as_the_reason_for_other_bits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert compare_environment(SavedRun(run), environment_facts()) == (
        ChangedFact("flags.NCCL_ALGO", None, "Ring", False),  # the run was made on a CPU
        ChangedFact("flags.NVIDIA_TF32_OVERRIDE", None, "0", True),
    )
    assert "2 differences, of which 1 can change the results (*)" in held(verify_run(run))["environment"].text
    assert "bitwise equal" in held(verify_run(run, num_steps=2))["replay"].text


def test_a_run_is_audited_while_it_stands_still_and_after_it_went_on(
    data: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "killed"
    config = tiny_config(data, run, **KEEP_ALL)
    for step, done in ((7, 6), (5, 8)):  # the second start resumes from step 4 and is killed in step 9
        with monkeypatch.context() as patch:
            kill_at(step, patch)
            with pytest.raises(KeyboardInterrupt):
                train(config)
        report = audit_run(run)
        assert (report.steps, report.positions) == (done, done * 8)
        assert check_integrity(SavedRun(run)).status == "failed"
    train(config)
    assert (run / LEDGER).read_bytes() == (finished / LEDGER).read_bytes()
    report = audit_run(run)
    assert (report.steps, report.checkpoints, report.rows) == (12, [4, 8, 12], {"a": 30, "b": 31})
    assert sum(report.drawn.values()) == 96
    assert sum(event["tokens"] for event in metrics(run, "train")[-1:]) == report.targets


def test_an_old_ledger_that_was_put_back_is_found(run: Path) -> None:
    lines = (run / LEDGER).read_bytes().splitlines(keepends=True)
    (run / LEDGER).write_bytes(b"".join(lines[:10]))
    reseal(run)
    for check in (audit_run, lambda run, data=None: check_integrity(SavedRun(run), data)):
        with pytest.raises(CheckpointError, match="it ends at line 10, but the checkpoint of step 12 names line 13"):
            check(run)


def test_a_checkpoint_of_another_version_is_said_to_be_one_and_not_damaged(run: Path) -> None:
    path = run / "checkpoints/step-00000008/manifest.json"
    path.write_bytes(sealed(unsealed(path.read_bytes()) | {"format": 1}))
    reseal(run)
    for check in (audit_run, lambda run, data=None: check_integrity(SavedRun(run), data)):
        with pytest.raises(CheckpointError, match=f"{path}: it has format 1 of checkpoints, .* use the version") as caught:
            check(run)
        assert "damaged" not in str(caught.value)


def test_the_ledger_of_another_run_and_other_counters_are_found(run: Path, data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, tmp_path / "other", seed=2))
    right = (run / LEDGER).read_bytes()
    shutil.copyfile(tmp_path / "other" / LEDGER, run / LEDGER)
    reseal(run)
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 4 .* they do not belong to the same run"):
        audit_run(run)
    (run / LEDGER).write_bytes(right)
    store = CheckpointStore(run / "checkpoints")
    checkpoint = store.load(8)
    progress = checkpoint.state["progress"] | {"rows": 72}
    store.save(replace(checkpoint, state={**checkpoint.state, "progress": progress}))
    with pytest.raises(
        CheckpointError, match=r"the checkpoint of step 8 has the counters .*'positions': 72.* they do not belong to the same run"
    ):
        audit_run(run)


def test_settings_that_can_no_longer_be_read_are_named(run: Path) -> None:
    (run / "config.toml").write_text("[train")
    with pytest.raises(CheckpointError, match=r"config\.toml: its digest is sha256:"):
        check_integrity(SavedRun(run))


def test_a_mixture_is_audited(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "mixed"
    train(tiny_config(data, run, mixture={"weights": {"a": 3, "b": 1}}))
    assert audit_run(run).drawn == {"a": 72, "b": 24}
    assert replay_run(run, 4).difference == ""


def test_what_the_guard_left_out_and_withheld_is_proven_and_replayed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "guarded"
    poisoned = {120: 10.0, 128: 10.0, 48: math.nan}  # position of the batch, and the factor of its loss

    def stepping(training: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.start in poisoned:
            training.loss.custom_loss = partial(multiplied, poisoned[batch.start])
        try:
            return train_step(training, batch, *args, **kwargs)
        finally:
            training.loss.custom_loss = None

    guard = {"loss_window": 8, "spike": "rollback", "window_steps": 2}
    with monkeypatch.context() as patch:
        patch.setattr("trainer.loop.train_step", stepping)
        train(tiny_config(data, run, limits={"steps": 20}, schedule={"decay_steps": 20}, guard=guard, **KEEP_ALL))
    report = audit_run(run)
    assert report.withheld == [7]
    assert (report.steps, report.left_out, report.positions) == (20, 16, 176)
    [window] = report.skipped
    assert (window.after_step, window.start, window.count) == (12, 120, 16)
    assert "step 16: loss" in window.reason
    check_integrity(SavedRun(run))
    assert replay_run(run, 8, start=12).difference == ""


def multiplied(factor: float, logits: torch.Tensor, targets: torch.Tensor, _: object) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") * factor


def test_the_text_behind_a_step_is_what_its_rows_hold(run: Path, data: Path) -> None:
    page = show_step(run, 8)
    assert page.startswith("step 8: 8 rows from position 56 of the order on, epoch 0")
    shown = json.loads(show_step(run, 8, as_json=True))
    assert len(shown["rows"]) == 8
    row = shown["rows"][0]
    assert len(row["documents"]) == 2
    assert row["padding"] + sum(document["tokens"] for document in row["documents"]) == 32
    assert all(line in page for document in row["documents"] for line in document["text"].splitlines())
    with pytest.raises(ProjectError, match=r"--step 13: the ledger of .* has the steps 1 to 12"):
        show_step(run, 13)


def test_special_tokens_and_hostile_characters_are_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = write_text(tmp_path / "text", "\u202e\x1b[31m")
    train(tiny_config(prepared(text, tmp_path / "data"), run, limits={"steps": 4}, schedule={"decay_steps": 8}))
    page = "".join(show_step(run, step) for step in (1, 2, 3, 4))
    assert "⟨eos⟩" in page
    assert "⟨U+202E⟩" in page
    assert not {"\x1b", "\u202e"} & set(page)


def test_data_is_prepared_again_and_a_changed_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    text = write_text(tmp_path / "text")
    train(tiny_config(prepared(text, tmp_path / "data"), run, limits={"steps": 4}, schedule={"decay_steps": 8}))

    monkeypatch.setenv("PREP_ROW_LENGTH", "16")  # the shell of the user may set options for another preparation

    def outcome(*sources: str) -> Outcome:
        return held(verify_run(run, level="data", sources=sources))["data"]

    assert outcome(str(text)).facts == {"prepared_again": True}
    assert "is not known; give --sources" in outcome().text
    (text / "two.txt").write_text((text / "two.txt").read_text().replace("number 7 ", "number 8 "))
    with pytest.raises(PreparedDataError, match=r"the first of the inputs that differs: text/two\.txt has different content"):
        outcome(str(text))
    shutil.rmtree(text)
    with pytest.raises(PreparedDataError, match=r"its sources cannot be prepared again: error: .*no such file or folder"):
        outcome(str(text))


@pytest.mark.parametrize(("reproducibility", "replayed_on"), [("run", 2), ("elastic", 1)])
def test_a_run_of_two_ranks_is_replayed(data: Path, tmp_path: Path, reproducibility: str, replayed_on: int) -> None:
    run = tmp_path / "run"
    config = tiny_config(data, run, reproducibility=reproducibility, limits={"steps": 8}, **KEEP_ALL)
    assert start_ranks(config, 2).wait(timeout=240) == 0
    assert audit_run(run).steps == 8
    replay = replay_run(run, 4, start=4)
    assert (replay.num_ranks, replay.tensors_at, replay.difference) == (replayed_on, (8,), "")


def test_the_commands_print_what_they_find_and_end_with_the_documented_codes(run: Path) -> None:
    done = run_command("trainer", "verify", str(run), "--replay", "2", "--json")
    assert done.returncode == ExitCode.DONE, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    assert [level["level"] for level in answer["held"]] == ["integrity", "environment", "replay"]
    done = run_command("trainer", "audit", str(run))
    assert (done.returncode, "steps        1 to 12, each once" in done.stdout) == (ExitCode.DONE, True)
    damaged = flip_bit(run / LEDGER)
    done = run_command("trainer", "audit", str(run), "--json")
    assert done.returncode == ExitCode.CHECKPOINT
    assert json.loads(done.stdout)["ok"] is False
    assert str(damaged) in done.stderr
    assert run_command("trainer", "verify", str(run), "--replay", "0").returncode == ExitCode.CONFIG


def test_no_secret_gets_into_anything_that_a_run_writes(tmp_path: Path) -> None:
    canary = "canary-51c2"
    variables = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "TRAINER_PASSWORD"), canary)
    variables |= {"HTTPS_PROXY": f"http://user:{canary}@proxy:3128", "PIP_INDEX_URL": f"https://user:{canary}@index/simple"}
    text, recipe, data, run = write_text(tmp_path / "text"), tmp_path / "recipe.toml", tmp_path / "data", tmp_path / "run"
    settings = PARAGRAPHS | {"ray_address": f"ray://user:{canary}@head:10001", "source": {"web": {"paths": [f"file://{text}"]}}}
    recipe.write_text(to_toml("prepare", settings))
    done = run_command("data_pipeline", "prepare", "--recipe", str(recipe), "--output", str(data), **variables)
    assert done.returncode == 0, done.stderr
    config = tiny_config(data, run, limits={"steps": 4}, schedule={"decay_steps": 8})
    assert start_ranks(config, 1, **variables).wait(timeout=120) == 0
    files = [path for folder in (data, run) for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(run).parts[0] for path in files if path.is_relative_to(run)}
    assert {"record.json", "config.toml", "ledger", "metrics.jsonl", "tensorboard", "checkpoints"} <= names
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
    address = f"s3://key:{canary}@bucket/data"
    done = run_command("trainer", "train", "--data", address, "--run", str(tmp_path / "none"), "--limits.steps", "1", **variables)
    assert done.returncode == ExitCode.DATA
    assert [path for path in (tmp_path / "none").rglob("*") if path.is_file() and canary.encode() in path.read_bytes()] == []


def test_packages_that_differ_from_the_lock_are_named_at_the_start_and_by_verify_and_are_recorded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = {**environment.installed_packages(), "tqdm": "4.0.1"}
    monkeypatch.setattr(environment, "installed_packages", lambda: installed)
    train(tiny_config(data, tmp_path / "run"))
    [named] = [message for message in caplog.messages if "env/requirements.lock" in message]
    assert "tqdm 4.0.1 (lock: 4." in named
    recorded = record_of(tmp_path / "run")["environment"]
    assert recorded["lock"] == "requirements.lock"
    assert recorded["unlocked"]["tqdm"].startswith("4.0.1 (lock: ")
    outcome = held(verify_run(tmp_path / "run"))["environment"]
    assert outcome.text.startswith("environment  as recorded\n  ")
    assert "tqdm 4.0.1 (lock: " in outcome.text
    assert "tqdm" in outcome.facts["unlocked"]


def test_a_run_of_a_version_that_recorded_less_resumes_and_differs_in_nothing(
    data: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = record_of(run)
    for name in ("nodes", "nccl"):
        del record["identity"][name]
    for name in ("cudnn", "nccl", "driver", "lock", "unlocked", "gpu_memory_bytes", "image_digest"):
        del record["environment"][name]
    (run / "record.json").write_bytes(sealed(record))
    assert compare_environment(SavedRun(run), environment_facts()) == ()
    caplog.set_level("INFO")
    train(tiny_config(data, run, limits={"steps": 14}, **KEEP_ALL))
    [differences] = [message for message in caplog.messages if "differences from the previous start" in message]
    assert differences.splitlines()[1:] == ["    limits.steps: 12 before, 14 now"]
    assert record_of(run)["earlier"] == []
    assert record_of(run)["identity"]["nodes"] == 1

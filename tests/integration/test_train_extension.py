"""Training with a user's extension file: every hook is called at its place, and the examples in `examples/` work unchanged."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import ConfigError
from common.files import digest_file
from tests.support.checkpoints import same
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import ROOT, losses, metrics, run_command, start_ranks, tiny_config
from trainer.checkpoint.store import CheckpointStore, checkpoint_files
from trainer.loop import train
from trainer.runs.saved_run import SavedRun

EXAMPLES = ROOT / "examples"

DIARY = """
import json


def _note(run, *words):
    if run.is_main:
        with (run.config.run / "hooks.jsonl").open("a") as file:
            file.write(json.dumps([run.progress.step, *words]) + "\\n")


def on_train_start(run):
    _note(run, "start", run.world_size)


def on_step_end(run, metrics):
    _note(run, "step", metrics.step, metrics.loss.hex())


def on_evaluate(run, evaluation):
    _note(run, "evaluate", evaluation.loss, run.progress.evaluated_step)


def on_save(run, step, path):
    _note(run, "save", step, path.name, path.is_dir())


def on_train_end(run):
    _note(run, "end")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run without an extension, and its last line."""
    run = tmp_path_factory.mktemp("runs") / "plain"
    return run, train(tiny_config(data, run))


def hooks(run: Path) -> list[list[object]]:
    return [json.loads(line) for line in (run / "hooks.jsonl").read_text().splitlines()]


def test_hooks_are_called_in_the_order_of_the_loop_and_change_no_bit(data: Path, tmp_path: Path, plain: tuple[Path, str]) -> None:
    extension, run = tmp_path / "diary.py", tmp_path / "run"
    extension.write_text("import torch\n" + DIARY + "    torch.rand(3)\n")
    assert train(tiny_config(data, run, extension=extension, limits={"steps": 5})).endswith("steps 5")
    assert train(tiny_config(data, run, extension=extension)) == plain[1]
    assert losses(run) == losses(plain[0])

    calls = hooks(run)
    assert calls[0] == [0, "start", 1]
    assert [call for call in calls if call[1] == "step"] == [[step, "step", step, loss] for step, loss in losses(plain[0])]
    evaluations = {event["step"]: event["val_loss"] for event in metrics(run, "eval")}
    assert [call for call in calls if call[1] == "evaluate"] == [
        [step, "evaluate", loss, step] for step, loss in evaluations.items()
    ]
    saves = [call for call in calls if call[1] == "save"]
    assert {call[2] for call in saves} >= {5, 10, 12}
    assert all(call == [call[2], "save", call[2], f"step-{call[2]:08d}", True] for call in saves)
    restart = calls.index([5, "start", 1])
    assert calls[restart - 1] == [5, "end"]
    assert calls[-1] == [12, "end"]


def test_two_ranks_call_hooks_too(data: Path, tmp_path: Path) -> None:
    extension, run = tmp_path / "both.py", tmp_path / "run"
    extension.write_text('def on_train_end(run):\n    (run.config.run / f"end-{run.rank}").write_text(str(run.world_size))\n')
    assert start_ranks(tiny_config(data, run, extension=extension, limits={"steps": 4}), 2).wait(timeout=240) == 0
    assert [(run / f"end-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


def test_an_error_in_a_hook_ends_the_training_in_one_line_with_its_place(data: Path, tmp_path: Path) -> None:
    extension = tmp_path / "broken.py"
    extension.write_text("def on_step_end(run, metrics):\n    if metrics.step == 3:\n        1 / 0\n")
    with pytest.raises(ConfigError, match=r"broken.py, line 3, in on_step_end: ZeroDivisionError: division by zero"):
        train(tiny_config(data, tmp_path / "run", extension=extension))


def test_a_run_goes_on_only_with_the_extension_that_it_began_with(data: Path, tmp_path: Path) -> None:
    extension, run = tmp_path / "mine.py", tmp_path / "run"
    extension.write_text("def on_train_end(run): pass\n")
    train(tiny_config(data, run, extension=extension, limits={"steps": 5}))
    assert (run / "extension.py").read_bytes() == extension.read_bytes()
    extension.write_text("def on_train_end(run): return\n")
    for other in (extension, None):
        with pytest.raises(ConfigError, match=r"extension was sha256:[0-9a-f]{64} and is "):
            train(tiny_config(data, run, extension=other))
    assert train(tiny_config(data, run, extension=extension, resume={"allow_changes": ["extension"]})).endswith("steps 12")


def test_a_run_keeps_the_files_of_a_package_and_goes_on_only_with_all_of_them(data: Path, tmp_path: Path) -> None:
    package, run, whole = tmp_path / "mine", tmp_path / "run", tmp_path / "whole"
    package.mkdir()
    (package / "__init__.py").write_text("from .parts.model import build_model\n")
    (package / "parts").mkdir()
    (package / "parts/model.py").write_bytes((EXAMPLES / "decoder.py").read_bytes())
    (package / "parts/notes.txt").write_text("two layers")
    files = ["__init__.py", "parts/model.py", "parts/notes.txt"]
    last_line = train(tiny_config(data, whole, extension=package))
    train(tiny_config(data, run, extension=package, limits={"steps": 5}))
    record = record_of(run)
    digests = {name: digest_file(package / name) for name in files}
    assert record["identity"]["extension"] == digests
    assert {name: record["files"][f"extension/{name}"] for name in files} == digests

    (package / "parts/notes.txt").write_text("three layers")
    changed = f"configuration: extension.parts/notes.txt was {digests['parts/notes.txt']} and is sha256:[0-9a-f]{{64}}. Use"
    with pytest.raises(ConfigError, match=changed):
        train(tiny_config(data, run, extension=package))
    (package / "parts/notes.txt").unlink()
    with pytest.raises(ConfigError, match=r"extension.parts/notes.txt was sha256:[0-9a-f]{64} and is none"):
        train(tiny_config(data, run, extension=package))
    (package / "parts/notes.txt").write_text("two layers")
    assert train(tiny_config(data, run, extension=package)) == last_line

    shutil.rmtree(package)
    for words in (("verify", "--level", "integrity", "--replay", "4"), ("evaluate",)):
        done = run_command("trainer", words[0], str(run), *words[1:])
        assert done.returncode == 0, done.stderr
    plain = tmp_path / "plain.py"
    plain.write_text((run / "extension/parts/model.py").read_text())
    train(tiny_config(data, run, extension=plain, limits={"steps": 13}, resume={"allow_changes": ["extension"]}))
    assert not [path for path in (run / "extension").rglob("*") if path.is_file()]
    assert run_command("trainer", "verify", str(run), "--level", "integrity").returncode == 0


def test_the_example_callbacks_keep_a_diary(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(data, run, extension=EXAMPLES / "callbacks.py"))
    events = [json.loads(line) for line in (run / "diary.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "start"
    assert [event["loss"] for event in events if event["event"] == "evaluation"] == [
        event["val_loss"] for event in metrics(run, "eval")
    ]
    weights = 4 * SavedRun(run).manifest(12).num_weights
    assert all(event["bytes"] > 3 * weights for event in events if event["event"] == "checkpoint"), "a moment is missing"
    assert {event["of_step"] for event in events if event["event"] == "checkpoint"} >= {5, 10, 12}
    assert events[-1] == {"event": "end", "step": 12}


def test_the_example_callbacks_copy_every_checkpoint_whole(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, copies = tmp_path / "run", tmp_path / "copies"
    monkeypatch.setenv("COPY_CHECKPOINTS_TO", str(copies))
    train(tiny_config(data, run, extension=EXAMPLES / "callbacks.py", checkpoint={"keep_last": 2}))
    assert {int(copy.name.removeprefix("step-")) for copy in copies.iterdir()} >= {5, 10, 12}
    for copy in copies.iterdir():
        store = CheckpointStore(copy)
        [step] = store.steps()
        assert copy.name == store.path(step).name
        store.verify(step)
        assert len(list((copy / "objects").iterdir())) == len(set(checkpoint_files(store.path(step)))) - 1, "nothing else is in it"
    original, last = (store.load(12) for store in (CheckpointStore(run / "checkpoints"), CheckpointStore(copies / "step-00000012")))
    assert same(original, last)
    assert not (run / ".saved").exists()


def test_what_hooks_log_is_in_every_sink_once_also_after_a_resume(data: Path, tmp_path: Path) -> None:
    extension, run, whole = tmp_path / "logs.py", tmp_path / "run", tmp_path / "whole"
    extension.write_text(
        "def on_step_end(run, metrics):\n    run.log_scalar('own/step', run.progress.step / 2)\n"
        "def on_evaluate(run, evaluation):\n    run.log_scalar('own/loss', evaluation.loss)\n"
        "def on_save(run, step, path):\n    run.log_scalar('saved', step)\n"
    )
    train(tiny_config(data, whole, extension=extension))
    train(tiny_config(data, run, extension=extension, limits={"steps": 7}))
    train(tiny_config(data, run, extension=extension))

    def logged(of: Path, hook: str) -> list[tuple[int, dict[str, float]]]:
        return [(event["step"], event["values"]) for event in metrics(of, "scalars") if event["hook"] == hook]

    assert logged(whole, "on_step_end") == [(step, {"own/step": step / 2}) for step in range(1, 13)]
    evaluations = [(event["step"], {"own/loss": event["val_loss"]}) for event in metrics(whole, "eval")]
    assert logged(whole, "on_evaluate") == evaluations
    assert {step for step, _ in logged(whole, "on_save")} >= {5, 10, 12}
    for hook in ("on_step_end", "on_save"):
        assert sorted({step for step, _ in logged(run, hook)}) == sorted(step for step, _ in logged(run, hook))
    assert logged(run, "on_step_end") == logged(whole, "on_step_end")
    for of in (whole, run):
        events = EventAccumulator(str(of / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        assert [point.step for point in events.Scalars("extension/own/step")] == list(range(1, 13))
        assert [point.step for point in events.Scalars("extension_evaluation/own/loss")] == [
            event["step"] for event in metrics(of, "eval")
        ]


def test_a_loss_that_returns_a_mean_is_warned_of_in_the_first_step(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extension = tmp_path / "mean.py"
    text = "from torch.nn.functional import cross_entropy\ndef loss(logits_BLV, targets_BL, weights_BL):\n    return cross_entropy("
    for reduction, expected in (("sum", 0), ("mean", 1)):
        extension.write_text(f"{text}logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), reduction={reduction!r})\n")
        caplog.clear()
        train(tiny_config(data, tmp_path / reduction, extension=extension, limits={"steps": 3}))
        assert sum("a loss must be the sum over all targets" in record.getMessage() for record in caplog.records) == expected


def test_the_example_loss_is_minimised_and_validation_stays_cross_entropy(
    data: Path, tmp_path: Path, plain: tuple[Path, str]
) -> None:
    run = tmp_path / "run"
    train(tiny_config(data, run, extension=EXAMPLES / "loss.py"))
    ours, cross_entropy = metrics(run, "train"), metrics(plain[0], "train")
    assert ours[0]["loss"] < cross_entropy[0]["loss"]  # every term is smaller
    assert ours[-1]["loss"] < ours[0]["loss"]
    assert metrics(run, "eval")[0] | {"perplexity": 0} == metrics(plain[0], "eval")[0] | {"perplexity": 0}


@pytest.mark.parametrize("example", ["model.py", "decoder.py"])
def test_the_example_model_trains_resumes_exactly_and_can_be_evaluated(data: Path, tmp_path: Path, example: str) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    extension = EXAMPLES / example
    last_line = train(tiny_config(data, whole, extension=extension))
    train(tiny_config(data, stopped, extension=extension, limits={"steps": 5}))
    assert train(tiny_config(data, stopped, extension=extension)) == last_line
    assert metrics(whole, "train")[-1]["loss"] < metrics(whole, "train")[0]["loss"]

    evaluated = run_command("trainer", "evaluate", str(whole), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["val_loss"] == metrics(whole, "eval")[-1]["val_loss"]
    generated = run_command("trainer", "generate", str(whole), "--prompt", "the", "--max_tokens", "4")
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.startswith("the")


@pytest.mark.parametrize(("example", "expected"), [("loss.py", ["z_loss", "chunk_tokens"]), ("callbacks.py", [])])
def test_settings_of_the_loss_are_told_to_have_no_effect_where_an_extension_defines_it(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, example: str, expected: list[str]
) -> None:
    changes = {"loss": {"z_loss": 1e-4, "chunk_tokens": 16}, "limits": {"steps": 1}}
    with caplog.at_level(logging.WARNING):
        train(tiny_config(data, tmp_path / "run", extension=EXAMPLES / example, **changes))
    warnings = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert warnings == [f"loss.{name} has no effect: it needs the built-in loss" for name in expected]

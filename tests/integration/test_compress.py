"""`compress` writes a smaller run that all commands take, compares both models, and refuses what it cannot compress."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError, ConfigError
from tests.support.labelled import labelled_records, prepare_labelled
from tests.support.pairs import pair_config, write_pairs, write_trunk
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import metrics, run_command, tiny_config
from trainer.checkpoint.of_run import load_checkpoint
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.compress import CompressOptions
from trainer.commands.compress import run as compress
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.commands.export import ExportOptions
from trainer.commands.export import run as export
from trainer.interop.export import verify_export
from trainer.loop import train
from trainer.runs.saved_run import SavedRun


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with six steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_prepared(folder / "data")
    train(tiny_config(folder / "data", folder / "run", limits={"steps": 6}, eval={"sample_tokens": 0}))
    return folder / "run"


def compressed(
    trained: Path, output: Path, method: str, capsys: pytest.CaptureFixture[str], **settings: object
) -> dict[str, object]:
    compress(CompressOptions.model_validate({"run": trained, "output": output, "method": method, "as_json": True, **settings}))
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def check_commands(run: Path, trained: Path) -> None:
    """Generate, evaluate, verify and export a compressed run, refuse to continue it, and begin a new run with its weights."""
    assert run_command("trainer", "generate", str(run), "--prompt", "a", "--max_tokens", "4").returncode == 0
    evaluated = run_command("trainer", "evaluate", str(run), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    loss = json.loads(evaluated.stdout)["val_loss"]
    verified = run_command("trainer", "verify", str(run))
    assert "of the compressed model are unchanged" in verified.stdout
    refused = run_command("trainer", "train", "--run", str(run))
    assert refused.returncode == 2
    assert "its model is compressed" in refused.stderr
    train(tiny_config(trained.parent / "data", run.parent / "new", init=run, limits={"steps": 1}, eval={"sample_tokens": 0}))
    assert metrics(run.parent / "new", "eval")[0]["val_loss"] == loss
    output = run.parent / "export"
    export(ExportOptions(run=run, output=output))
    assert verify_export(output, run)["compared_with_run"]
    facts = record_of(run)["compressed"]
    card = (output / "README.md").read_text()
    assert "Not trained here: the compressed model of another run." in card
    assert f"| method | {facts['method']} |" in card
    assert f"| perplexity after the compression | {facts['comparison']['after']['perplexity']:.4g} |" in card


@pytest.mark.parametrize("method", ["prune", "prune-2-4"])
def test_a_pruned_run_is_smaller_has_the_zeros_and_works_with_the_commands(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    facts = compressed(trained, tmp_path / "small", method, capsys)
    before, after = facts["before"], facts["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert after["weight_bytes"] < before["weight_bytes"]
    assert after["perplexity"] != before["perplexity"]
    weights = load_checkpoint(SavedRun(tmp_path / "small"), "latest").model
    original = load_checkpoint(SavedRun(trained), "latest").model
    assert list(weights) == list(original)
    for name, weight in weights.items():
        if weight.ndim == 2 and ".layers." in name:
            assert int((weight == 0).sum()) == weight.numel() // 2
            assert torch.equal(weight[weight != 0], original[name][weight != 0])
        else:
            assert torch.equal(weight, original[name])
    check_commands(tmp_path / "small", trained)


@pytest.mark.optional
@pytest.mark.parametrize(("method", "group", "largest"), [("int8", None, 127), ("int4", 16, 7)])
def test_a_quantised_run_is_smaller_and_its_weights_are_rounded_to_the_nearest_integer_times_the_scale(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, group: int | None, largest: int
) -> None:
    facts = compressed(trained, tmp_path / "small", method, capsys, **({} if group is None else {"group_size": group}))
    before, after = facts["before"], facts["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert after["weight_bytes"] < before["weight_bytes"] * 0.35
    weights = load_checkpoint(SavedRun(tmp_path / "small"), "latest").model
    original = load_checkpoint(SavedRun(trained), "latest").model
    assert list(weights) == list(original)
    matrices = [name for name, weight in weights.items() if weight.ndim == 2 and ".layers." in name]
    assert matrices
    for name in matrices:
        grouped = original[name].unflatten(1, (-1, group or original[name].shape[1]))
        steps = grouped.abs().amax(-1, keepdim=True) / largest
        errors = (weights[name].view_as(grouped) - grouped).abs()
        assert bool((errors <= 0.51 * steps).all())
        assert bool(errors.any())
    check_commands(tmp_path / "small", trained)


@pytest.mark.optional
def test_a_group_size_that_does_not_divide_the_columns_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--group_size 7 does not divide"):
        compress(CompressOptions(run=trained, output=tmp_path / "small", method="int4", group_size=7))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("method", "setting"), [("int8", "group_size"), ("prune", "group_size"), ("prune-2-4", "share")])
def test_a_setting_of_another_method_is_refused(trained: Path, tmp_path: Path, method: str, setting: str) -> None:
    words = ["--method", method, "--output", str(tmp_path / "small"), f"--{setting}", "0.5" if setting == "share" else "16"]
    refused = run_command("trainer", "compress", str(trained), *words)
    assert (refused.returncode, list(tmp_path.iterdir())) == (2, [])
    assert f"--{setting} has an effect only with --method" in refused.stderr


def test_weights_that_do_not_fit_the_memory_are_not_unpacked(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed(trained, tmp_path / "small", "prune", capsys)
    num_weights = sum(weight.numel() for weight in load_checkpoint(SavedRun(trained), "latest").model.values())
    monkeypatch.setattr("trainer.checkpoint.of_run.unpack", lambda _: pytest.fail("the weights were unpacked"))
    monkeypatch.setattr("common.hardware.available_host_bytes", lambda: 4 * num_weights - 1)
    with pytest.raises(ConfigError, match=rf"the model has {num_weights} weights, which take .* of memory are free"):
        load_checkpoint(SavedRun(tmp_path / "small"), "latest")


def test_data_that_is_gone_leaves_the_perplexity_out(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(trained.parent / "data"), str(tmp_path / "gone")))
    compress(CompressOptions(run=tmp_path / "run", output=tmp_path / "small", method="prune"))
    printed = capsys.readouterr().out
    assert "no data" in printed
    assert "only the files are smaller" in printed


def test_an_output_that_exists_a_compressed_run_and_a_damaged_weight_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        compress(CompressOptions(run=trained, output=tmp_path, method="prune"))
    small = tmp_path / "small"
    compressed(trained, small, "prune", capsys)
    with pytest.raises(ConfigError, match="it is compressed already"):
        compress(CompressOptions(run=small, output=tmp_path / "smaller", method="prune"))
    store = CheckpointStore(small / "checkpoints")
    checkpoint = store.load(0)
    name = next(name for name in checkpoint.model if name.endswith(".values"))
    damaged = {**checkpoint.model, name: checkpoint.model[name][1:]}
    shutil.rmtree(small / "checkpoints")
    CheckpointStore(small / "checkpoints").save(type(checkpoint)(0, damaged, {}, checkpoint.state))
    with pytest.raises(CheckpointError, match=r"a weight of the compressed model is damaged: model\.layers\."):
        load_checkpoint(SavedRun(small), "latest")


@pytest.fixture(scope="module")
def preferring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned from two steps of preference pairs. `pairs` and `chats` beside it are prepared data."""
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder)
    write_trunk(folder)
    train(pair_config(folder / "pairs", folder / "trunk", folder / "run", limits={"steps": 2}))
    return folder / "run"


def test_a_run_that_learned_from_pairs_is_compressed_as_a_language_model(
    preferring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    facts = compressed(preferring, small, "prune", capsys, data=preferring.parent / "chats", share=0.01)
    before, after = facts["before"], facts["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert after["perplexity"] == pytest.approx(before["perplexity"], rel=0.05)
    assert SavedRun(small).config.objective == "language"
    template = "tokenizer/chat_template.jinja"
    assert (small / template).read_bytes() == (preferring / template).read_bytes()
    assert template in record_of(small)["files"]
    shutil.move(preferring.parent / "trunk", preferring.parent / "gone")  # the compressed run needs no reference
    found = json.loads(evaluate_run(EvaluateOptions(run=small, data=preferring.parent / "chats", as_json=True)))
    assert found["perplexity"] == after["perplexity"]


def test_pairs_of_answers_have_no_perplexity(preferring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = compressed(preferring, tmp_path / "small", "prune-2-4", capsys)
    assert [facts[when]["perplexity"] for when in ("before", "after")] == [None, None]  # type: ignore[index]
    with pytest.raises(ConfigError, match="has preference pairs, and a worse answer is no text to predict"):
        compressed(preferring, tmp_path / "other", "prune", capsys, data=preferring.parent / "pairs")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_classifier_is_refused_with_the_reason(tmp_path: Path) -> None:
    data = prepare_labelled(tmp_path, labelled_records(60))
    train(tiny_config(data, tmp_path / "run", objective="classification", model={"context": 64}, limits={"steps": 1}))
    with pytest.raises(ConfigError, match="with objective = classification the model is not the built-in decoder, and only that"):
        compress(CompressOptions(run=tmp_path / "run", output=tmp_path / "small", method="prune"))
    assert not (tmp_path / "small").exists()

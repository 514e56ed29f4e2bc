"""Runs that begin with the weights of another run: `init`."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError, ConfigError
from common.files import digest_file
from tests.support.prepared import write_prepared
from tests.support.published import SENTENCES, write_published
from tests.support.records import record_of
from tests.support.runs import losses, metrics, run_command, start_ranks, tiny_config
from trainer import loop
from trainer.checkpoint.of_run import weights_digest
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.config import TrainConfig
from trainer.interop.import_model import import_model
from trainer.launch.train_settings import load_train_settings
from trainer.loop import train
from trainer.training.saver import Saver
from trainer.verification.verify import verify_run


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("other") / "data", seed=5)


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    train(tiny_config(write_prepared(folder / "data"), folder / "base"))
    return folder / "base"


@pytest.fixture
def base(base_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base_run, tmp_path / "base"))


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next training end with an error once the checkpoint of a step is saved."""
    save = Saver.save

    def save_and_fail(self: Saver, progress: Any) -> Any:
        saved = save(self, progress)
        if progress.step == step:
            self.finish()
            raise RuntimeError("killed")
        return saved

    monkeypatch.setattr(Saver, "save", save_and_fail)


def test_a_run_begins_at_step_0_with_the_weights_of_another_run(base: Path, other_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(other_data, run, init=base, checkpoint={"every_steps": 1, "keep_last": 50}, optim={"lr": 1e-30}))
    weights = weights_digest(CheckpointStore(base / "checkpoints").load(12).model)
    record = record_of(run)
    assert record["initial"] == {"record": digest_file(base / "record.json"), "step": 12, "weights": weights}
    assert record["identity"]["init"] == weights
    assert CheckpointStore(run / "checkpoints").steps() == list(range(1, 13))
    assert record["weights"] == weights  # such a rate changes no weight
    fresh = tmp_path / "fresh"
    train(tiny_config(other_data, fresh))
    assert "init" not in record_of(fresh)["identity"]
    assert losses(fresh)[0] != losses(run)[0]


def test_an_earlier_step_and_the_moving_average_can_be_chosen(base: Path, other_data: Path, tmp_path: Path) -> None:
    train(tiny_config(other_data, tmp_path / "averaged", init=base, init_checkpoint="10", ema={"decay": 0.9}))
    assert record_of(tmp_path / "averaged")["initial"]["step"] == 10
    every = {"every_steps": 1, "keep_last": 50}
    averaged = {"init": tmp_path / "averaged", "ema": {"decay": 0.9}}
    train(tiny_config(other_data, tmp_path / "run", **averaged, optim={"lr": 1e-30}, checkpoint=every))
    last = CheckpointStore(tmp_path / "averaged" / "checkpoints").load(12)
    assert record_of(tmp_path / "run")["initial"]["weights"] == weights_digest(last.average) != weights_digest(last.model)
    begun = CheckpointStore(tmp_path / "run" / "checkpoints").load(1)
    assert weights_digest(begun.average) == weights_digest(begun.model)  # the average begins with the new weights too
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        train(tiny_config(other_data, tmp_path / "none", init=base, init_checkpoint="7"))


def test_a_resume_has_the_same_bits_without_the_other_run(
    base: Path, other_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(other_data, tmp_path / "whole", init=base)
    whole = train(config)
    stopped = config.model_copy(update={"run": tmp_path / "stopped"})
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(RuntimeError, match="killed"):
            train(stopped)
    initial = record_of(tmp_path / "stopped")["initial"]
    shutil.rmtree(base)
    assert train(stopped) == whole
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert record_of(tmp_path / "stopped")["initial"] == initial
    longer = tiny_config(other_data, tmp_path / "stopped", limits={"steps": 14})  # without init
    train(longer)
    assert record_of(tmp_path / "stopped")["initial"] == initial


def test_a_start_that_saved_nothing_reads_the_other_run_again(
    base: Path, other_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(other_data, tmp_path / "run", init=base)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_on", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            train(config)
    assert train(config) == train(config.model_copy(update={"run": tmp_path / "whole"}))


def test_a_run_that_began_otherwise_is_not_continued_with_init(base: Path, other_data: Path, tmp_path: Path) -> None:
    new = tiny_config(other_data, tmp_path / "new")
    train(new)
    with pytest.raises(ConfigError, match=r"this run began with new weights, and init = .*base names others; leave out init"):
        train(new.model_copy(update={"init": base}))
    run = tiny_config(other_data, tmp_path / "run", init=base)
    digest = train(run)
    with pytest.raises(ConfigError, match=r"began with the weights of step 12 of .*base, and init = .*new names others"):
        train(run.model_copy(update={"init": tmp_path / "new"}))
    moved = Path(shutil.move(base, tmp_path / "moved"))
    assert train(run.model_copy(update={"init": moved})) == digest
    with pytest.raises(ConfigError, match="init and run are the same folder"):
        train(tiny_config(other_data, tmp_path / "self", init=tmp_path / "self"))


def test_a_branch_of_such_a_run_keeps_the_record_of_its_first_weights(base: Path, other_data: Path, tmp_path: Path) -> None:
    trunk = tiny_config(other_data, tmp_path / "trunk", init=base)
    train(trunk)
    shutil.rmtree(base)
    branch = {"run": tmp_path / "branch", "branch": {"run": tmp_path / "trunk", "step": 10}}
    train(TrainConfig.model_validate(trunk.model_dump() | branch | {"limits": {"steps": 14}}))
    found, expected = record_of(tmp_path / "branch"), record_of(tmp_path / "trunk")
    assert found["origin"]["step"] == 10
    assert found["initial"] == expected["initial"]
    assert found["identity"]["init"] == expected["identity"]["init"]


def test_settings_that_do_not_fit_are_named(base: Path, other_data: Path, tmp_path: Path) -> None:
    for model, named in (
        ({"layers": 3}, "model.layers is 3, but 2 in that run; leave out model.layers"),
        ({"kv_heads": 4}, "model.kv_heads is 4, but 2 in that run"),
        ({"base_width": 16}, "model.base_width is 16, but none in that run"),
        (
            {"width": 64, "norm_eps": 1e-5},
            "model.width is 64, but 32 in that run, .*model.norm_eps is 1e-05, but 1e-06 in that run",
        ),
    ):
        with pytest.raises(ConfigError, match=named):
            train(tiny_config(other_data, tmp_path / "run", init=base, model=model))
    assert not (tmp_path / "run" / "record.json").exists()
    with pytest.raises(CheckpointError, match=r"no record.json, so this is not a run"):
        train(tiny_config(other_data, tmp_path / "run", init=tmp_path / "nothing"))


def test_other_settings_of_the_model_may_differ_and_a_longer_context_is_reported(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_prepared(tmp_path / "long", row_length=48)
    config = tiny_config(data, tmp_path / "run", init=base, model={"residual_dropout": 0.1, "activation_checkpointing": "full"})
    with pytest.raises(ConfigError, match=r"have 48 tokens, but model.context = 32; raise model.context"):
        train(config)
    with caplog.at_level(logging.WARNING):
        model = config.model.model_copy(update={"context": 48, "rope_theta": 5e4})
        train(config.model_copy(update={"model": model}))
    assert "model.context is 48, and 32 in" in caplog.text
    assert "model.rope_theta is 50000, and 10000 in" in caplog.text


def test_data_of_another_tokenizer_is_refused_with_the_command_that_prepares_it_again(base: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"the {number} birds of the sea sang to the cat" for number in range(400)))
    words = f"prepare --sources {tmp_path}/text.txt --row_length 32 --workers 1 --text.documents paragraphs --output".split()
    done = run_command("data_pipeline", *words, f"{tmp_path}/char", "--tokenizer.kind", "char")
    assert done.returncode == 0, done.stderr
    with pytest.raises(ConfigError, match="another tokenizer") as refused:
        train(tiny_config(tmp_path / "char", tmp_path / "run", init=base))
    option = f"--tokenizer.path {base}"
    assert f"trainer prepare {option} " in str(refused.value)
    done = run_command("data_pipeline", *words, f"{tmp_path}/data", *option.split())
    assert done.returncode == 0, done.stderr
    train(tiny_config(tmp_path / "data", tmp_path / "run", init=base))


def test_the_shape_comes_from_the_other_run_and_not_from_a_recipe(base: Path, other_data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[train]\ndata = "{other_data}"\n[train.model]\nlayers = 7\nwidth = 96\nresidual_dropout = 0.1\ncontext = 16\n'
        "[train.limits]\nsteps = 5\n"
    )
    words = ["--init", str(base), "--run", str(tmp_path / "run")]
    for chosen in (["--recipe", str(recipe)], ["--recipe", "auto", "--data", str(other_data), "--limits.steps", "5"]):
        model = load_train_settings([*words, *chosen]).model
        assert (model.layers, model.width, model.heads, model.num_kv_heads, model.context) == (2, 32, 4, 2, 32)
    assert load_train_settings([*words, "--recipe", str(recipe), "--model.layers", "3"]).model.layers == 3  # refused at the start
    assert load_train_settings([*words, "--recipe", str(recipe)]).model.residual_dropout == 0.1
    with pytest.raises(CheckpointError, match="so this is not a run"):
        load_train_settings(["--init", str(tmp_path / "gone"), "--recipe", str(recipe), "--run", str(tmp_path / "run")])


def test_a_command_can_be_repeated_when_the_other_run_is_gone(base: Path, other_data: Path, tmp_path: Path) -> None:
    words = ["--recipe", "auto", "--data", str(other_data), "--limits.steps", "5", "--device", "cpu", "--threads", "1"]
    words += ["--init", str(base), "--run", str(tmp_path / "run"), "--eval.sample_tokens", "0"]
    first = train(load_train_settings(words))
    shutil.rmtree(base)
    again = [*words, "--resume.allow_changes", "schedule.decay_steps", "schedule.warmup_steps"]
    assert train(load_train_settings(again)) == first


def test_integrity_and_a_replay_from_step_0_are_verified_as_long_as_the_other_run_is_there(
    base: Path, other_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(tiny_config(other_data, run, init=base))
    train(
        tiny_config(
            base.parent / "none",
            base,
            data=read_data(base),
            limits={"steps": 14},
            schedule={"decay_steps": 14},
            resume={"allow_changes": ["schedule.decay_steps"]},
            checkpoint={"keep_last": 50},
        )
    )
    outcomes = {one.level: one for one in verify_run(run, train=train, level="environment", num_steps=12, start=0)}
    assert "the run began with" in outcomes["integrity"].text
    assert outcomes["integrity"].facts["initial"] == record_of(run)["initial"]
    assert "bitwise equal: 12 steps (1 to 12)" in outcomes["replay"].text
    shutil.rmtree(base)
    assert "bitwise equal: 2 steps (11 to 12)" in list(verify_run(run, train=train, num_steps=2, start=10))[-1].text
    with pytest.raises(CheckpointError, match=r"a replay from step 0 needs them: put that run back into .*base, or begin with"):
        list(verify_run(run, train=train, num_steps=2, start=0))


def test_other_weights_under_the_same_name_are_not_replayed(base: Path, other_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(other_data, run, init=base))
    shutil.rmtree(base)
    train(tiny_config(other_data, base, seed=3))
    with pytest.raises(CheckpointError, match="the weights of step 12 have the digest sha256"):
        list(verify_run(run, train=train, num_steps=2, start=0))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_begin_with_the_same_weights(base: Path, other_data: Path, tmp_path: Path, parallel: str) -> None:
    elastic = {"reproducibility": "elastic"} if parallel == "ddp" else {"optim": {"lr": 1e-30}}
    config = tiny_config(other_data, tmp_path / "two", init=base, parallel=parallel, ema={"decay": 0.9}, **elastic)
    process = start_ranks(config, 2)
    assert process.wait(240) == 0, config.run.with_suffix(".log").read_text()
    one = train(config.model_copy(update={"run": tmp_path / "one"}))
    assert one == f"weights {record_of(tmp_path / 'two')['weights']} steps 12"


def read_data(run: Path) -> Path:
    return Path(load_train_settings(["--run", str(run)]).data)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An imported model, and data that was prepared with the tokenizer of its directory."""
    folder = tmp_path_factory.mktemp("imported")
    directory = write_published(folder / "published", "llama", num_files=2)
    import_model(directory, folder / "run")
    (folder / "text.txt").write_text("\n\n".join(SENTENCES * 10))
    words = f"prepare --sources {folder}/text.txt --row_length 64 --workers 1 --text.documents paragraphs --output {folder}/data"
    options = f"--tokenizer.path {directory} --tokenizer.add_bos false --dedup.exact false --dedup.near false"
    done = run_command("data_pipeline", *words.split(), *options.split())
    assert done.returncode == 0, done.stderr
    return folder / "run", folder / "data"


def words_of(data: Path, run: Path, init: Path) -> list[str]:
    fixed = "--recipe none --device cpu --precision fp32 --threads 1 --reproducibility elastic --log.report false"
    rest = "--batch.global_batch_size 8 --batch.micro_batch_size 2 --limits.steps 6 --optim.lr 1e-3 --schedule.warmup_steps 2"
    return ["--data", str(data), "--run", str(run), "--init", str(init), *fixed.split(), *rest.split(), "--eval.sample_tokens", "0"]


def test_an_imported_model_is_trained_on_to_the_same_bits_on_one_and_two_ranks(imported: tuple[Path, Path], tmp_path: Path) -> None:
    init, data = imported
    one = train(load_train_settings(words_of(data, tmp_path / "one", init)))
    process = start_ranks(load_train_settings(words_of(data, tmp_path / "two", init)), 2)
    assert process.wait(240) == 0, (tmp_path / "two.log").read_text()
    assert one == f"weights {record_of(tmp_path / 'two')['weights']} steps 6"
    assert record_of(tmp_path / "one")["initial"]["weights"] == record_of(init)["weights"]
    first, *_, last = [event["val_loss"] for event in metrics(tmp_path / "one", "eval")]
    assert last < first
    outcomes = list(verify_run(tmp_path / "one", train=train, num_steps=6, start=0))
    assert "bitwise equal: 6 steps (1 to 6)" in outcomes[-1].text


def test_an_imported_model_is_evaluated_on_data_of_its_tokenizer(imported: tuple[Path, Path]) -> None:
    init, data = imported
    found = json.loads(evaluate_run(EvaluateOptions(run=init, data=data, as_json=True)))
    assert found["step"] == 0
    assert found["rows"] > 0
    assert found["val_loss"] > 4  # random weights

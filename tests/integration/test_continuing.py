"""A run is continued by `--run` alone and trained longer by one command. A refusal gives advice that works."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError, ConfigError
from common.settings.load import load_settings
from common.settings.options import help_parser
from tests.support.disturbed import stop, trained
from tests.support.prepared import write_prepared
from tests.support.runs import losses, tiny_config
from trainer.config import TrainConfig
from trainer.launch.finished import finished_as, longer_command, report_finished
from trainer.loop import train

_QUICK: dict[str, Any] = {
    "schedule": {"decay_steps": None, "warmup_steps": 1},
    "limits": {"steps": 4},
    "eval": {"every_steps": 100, "sample_tokens": 0, "max_rows": 4},
    "log": {"layers_every_steps": 0, "histograms_every_steps": 0},
}


def _config(data: Path, run: Path, **changes: Any) -> TrainConfig:
    merged = {name: dict(value) for name, value in _QUICK.items()}
    for name, value in changes.items():
        merged[name] = merged.get(name, {}) | value if isinstance(value, dict) else value
    return tiny_config(data, run, **merged)


def _loaded(*words: object) -> TrainConfig:
    return load_settings(TrainConfig, [*map(str, words)], help_parser(TrainConfig, "trainer train", ""), {})


def _parsed(command: str) -> TrainConfig:
    program, name, *words = shlex.split(command)
    assert (program, name) == ("trainer", "train")
    return _loaded(*words)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = _config(data, tmp_path_factory.mktemp("finished") / "run")
    train(config)
    return config.run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_run_alone_continues_a_stopped_run_with_its_own_settings(
    finished: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop(patch, 2)
        assert trained(_config(data, tmp_path / "run")).startswith("StoppedBySignal")
    train(_loaded("--run", tmp_path / "run"))
    assert losses(tmp_path / "run") == losses(finished)


def test_run_alone_takes_no_setting_of_one_start_alone(data: Path, tmp_path: Path) -> None:
    train(_config(data, tmp_path / "run", resume={"allow_changes": ("seed",)}))
    assert _loaded("--run", tmp_path / "run").resume.allow_changes == ()


@pytest.mark.parametrize("words", [("--data", "elsewhere"), ("--recipe", "demo")])
def test_data_or_a_recipe_replace_the_settings_of_the_run(run: Path, words: tuple[str, str]) -> None:
    words = (*words, *(() if "--data" in words else ("--data", "elsewhere")))
    assert _loaded("--run", run, *words, "--limits.steps", 9).model.layers != 2


def test_code_and_services_of_a_run_must_be_named_again(run: Path) -> None:
    settings = run / "config.toml"
    settings.write_text(settings.read_text().replace("[train]\n", '[train]\nextension = "of a stranger.py"\n', 1))
    with pytest.raises(ConfigError, match=r"add --extension 'of a stranger\.py', or none to leave it out"):
        _loaded("--run", run)
    assert _loaded("--run", run, "--extension", "none").extension is None


def test_the_start_of_a_finished_run_says_so_without_its_data(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(_config(data, run))
    capsys.readouterr()
    assert report_finished(_config(tmp_path / "gone", run))
    shown = capsys.readouterr()
    assert shown.out == f"{expected}\n"
    assert f"{run} is finished: 4 steps, ended by limits.steps." in shown.err
    assert f"trainer train --run {run} --limits.steps 8 --resume.allow_changes schedule.decay_steps" in shown.err


@pytest.mark.parametrize("changes", [{"limits": {"steps": 5}}, {"optim": {"lr": 1e-4}}, {"seed": 2}])
def test_a_start_with_other_settings_is_not_the_start_of_a_finished_run(run: Path, data: Path, changes: dict[str, Any]) -> None:
    assert finished_as(_config(data, run)) is not None
    assert finished_as(_config(data, run, **changes)) is None


def test_a_run_whose_last_checkpoint_is_damaged_is_not_finished(run: Path, data: Path) -> None:
    for path in (run / "checkpoints" / "objects").iterdir():
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert finished_as(_config(data, run)) is None


def test_a_finished_run_is_not_the_run_of_other_data(run: Path, tmp_path: Path) -> None:
    assert finished_as(_config(write_prepared(tmp_path / "other", seed=1), run)) is None


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "cosine"},
        {"kind": "linear"},
        {"kind": "wsd"},
        {"kind": "polynomial"},
        {"kind": "exponential"},
        {"kind": "step", "milestones": (2,)},
        {"kind": "constant"},
        {"kind": "cosine", "decay_steps": 4},
        {"kind": "constant", "weight_decay": "linear"},
    ],
    ids=lambda schedule: "-".join(map(str, schedule.values())),
)
def test_one_command_trains_longer_with_every_schedule(data: Path, tmp_path: Path, schedule: dict[str, Any]) -> None:
    config = _config(data, tmp_path / "run", schedule=schedule)
    train(config)
    assert train(_parsed(longer_command(config, "limits.steps"))).endswith(" steps 8")


@pytest.mark.parametrize(
    ("limits", "ended_by", "steps"),
    [
        ({"steps": None, "epochs": 0.5}, "limits.epochs", 8),
        ({"steps": None, "tokens": 400}, "limits.tokens", 3),
        ({"steps": 4, "epochs": 0.5}, "limits.steps", 8),
    ],
)
def test_the_command_to_train_longer_raises_the_limit_that_ended_the_run(
    data: Path, tmp_path: Path, limits: dict[str, Any], ended_by: str, steps: int
) -> None:
    config = _config(data, tmp_path / "run", limits=limits)
    train(config)
    record = finished_as(config)
    assert record is not None
    assert record.ended_by == ended_by
    again = _parsed(longer_command(config, ended_by))
    assert int(train(again).rpartition(" ")[2]) >= steps


def test_a_longer_schedule_is_refused_with_its_consequence_and_the_flag(run: Path, data: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train(_config(data, run, limits={"steps": 8}))
    assert "was planned to reach its floor at step 4, and is planned to do so at step 8 now" in str(refused.value)
    assert "results differ from those of an uninterrupted run" in str(refused.value)
    assert "--resume.allow_changes schedule.decay_steps" in str(refused.value)


_WORKS = {
    "model.norm_eps": {"model": {"norm_eps": 1e-5}},
    "model.residual_dropout": {"model": {"residual_dropout": 0.1}},
    "loss.z_loss": {"loss": {"z_loss": 1e-4}},
    "optim.lr": {"optim": {"lr": 1e-4}},
    "schedule.kind": {"schedule": {"kind": "linear"}},
    "guard.spike": {"guard": {"spike": "skip"}},
    "batch.micro_batch_size": {"batch": {"micro_batch_size": 4}},
    "seed": {"seed": 2},
    "precision": {"precision": "bf16"},
    "reproducibility": {"reproducibility": "off"},
    "parallel": {"parallel": "fsdp"},
}
_CANNOT_WORK = {
    "model.layers": {"model": {"layers": 3}},
    "model.width": {"model": {"width": 64}},
    "model.heads": {"model": {"heads": 2}},
    "model.kv_heads": {"model": {"kv_heads": 4}},
    "model.head_dim": {"model": {"head_dim": 2}},
    "model.mlp_width": {"model": {"mlp_width": 48}},
    "model.tie_embeddings": {"model": {"tie_embeddings": False}},
    "model.vocab_multiple": {"model": {"vocab_multiple": 128}},
    "optim.kind": {"optim": {"kind": "muon"}},
    "ema.decay": {"ema": {"decay": 0.5}},
}


@pytest.mark.parametrize("name", _WORKS)
def test_a_refusal_suggests_a_flag_with_which_the_run_continues(run: Path, data: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--resume.allow_changes .*{name}") as refused:
        train(_config(data, run, **_WORKS[name]))
    allowed = tuple(str(refused.value).rpartition("--resume.allow_changes ")[2].split())
    assert train(_config(data, run, **_WORKS[name], resume={"allow_changes": allowed})).endswith(" steps 4")


@pytest.mark.parametrize("name", _CANNOT_WORK)
def test_a_refusal_does_not_suggest_what_cannot_work(run: Path, data: Path, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        train(_config(data, run, **_CANNOT_WORK[name]))
    assert "allow_changes" not in str(refused.value)
    assert f"do not fit another value of {name}" in str(refused.value)
    longer = {"limits": {"steps": 8}, "resume": {"allow_changes": (name, "schedule.decay_steps")}}
    with pytest.raises(CheckpointError):
        train(_config(data, run, **_CANNOT_WORK[name] | longer))

"""An extension makes the passes of a micro-batch itself; the exchange between ranks and everything else stays with the trainer."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, losses, metrics, run_command, start_ranks, tiny_config
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.verification.replay import replay_run

EXAMPLES = [ROOT / "examples" / "adversarial.py", ROOT / "examples" / "two_tasks.py"]
ORDINARY = """
def training_step(micro):
    loss_sum = micro.loss_sum()
    micro.backward(loss_sum)
    return loss_sum
"""
TWO_HALVES = """
def training_step(micro):
    for _ in range(2):
        loss_sum = micro.loss_sum(draw=0)
        micro.backward(loss_sum / 2)
    return loss_sum
"""
ELASTIC = {"reproducibility": "elastic", "batch": {"global_batch_size": 8, "micro_batch_size": 2}}
SHORT = {"limits": {"steps": 6}, "model": {"residual_dropout": 0.1}}

example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def trained_by_ranks(config: TrainConfig, num_ranks: int) -> str:
    """Return the last line of a run on several ranks."""
    log = config.run.with_suffix(".log")
    assert start_ranks(config, num_ranks).wait(timeout=300) == 0, log.read_text()
    return [line for line in log.read_text().splitlines() if line.startswith("weights sha256:")][-1]


@pytest.mark.parametrize("text", [ORDINARY, TWO_HALVES], ids=["one pass", "two passes of half the loss"])
def test_a_step_that_does_what_the_trainer_does_has_the_same_bits(data: Path, tmp_path: Path, text: str) -> None:
    plain, own = tmp_path / "plain", tmp_path / "own"
    settings = SHORT | {
        "batch": {"micro_batch_size": 8}
    }  # half a gradient twice is the gradient, but not if it is added to another one
    last_line = train(tiny_config(data, plain, **settings))
    assert train(tiny_config(data, own, **settings, extension=written(tmp_path, text))) == last_line
    assert losses(own) == losses(plain)


def test_passes_have_masks_of_their_own_unless_they_name_the_same_draw(data: Path, tmp_path: Path) -> None:
    text = """
def training_step(micro):
    first, second, again = micro.loss_sum(), micro.loss_sum(), micro.loss_sum(draw=0)
    assert first.item() != second.item()
    assert first.item() == again.item()
    micro.backward(first)
    return first
"""
    train(tiny_config(data, tmp_path / "run", **SHORT | {"limits": {"steps": 2}}, extension=written(tmp_path, text)))


@example
def test_an_example_trains_resumes_exactly_and_replays(data: Path, tmp_path: Path, path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    last_line = train(tiny_config(data, whole, extension=path, model={"residual_dropout": 0.1}))
    train(tiny_config(data, stopped, extension=path, model={"residual_dropout": 0.1}, limits={"steps": 5}))
    assert train(tiny_config(data, stopped, extension=path, model={"residual_dropout": 0.1})) == last_line
    assert metrics(whole, "eval")[-1]["val_loss"] < metrics(whole, "eval")[0]["val_loss"]
    assert replay_run(whole, 10, train=train, start=0, trust_code=True).difference == ""


def test_the_adversarial_example_trains_other_weights_than_the_ordinary_step(data: Path, tmp_path: Path) -> None:
    plain, own = tmp_path / "plain", tmp_path / "own"
    train(tiny_config(data, plain, **SHORT))
    train(tiny_config(data, own, **SHORT, extension=EXAMPLES[0]))
    assert losses(own)[0] == losses(plain)[0], "the first pass of the first step is the ordinary one"
    norms = [metrics(run, "train")[0]["grad_norm"] for run in (plain, own)]
    assert norms[1] != norms[0]
    assert norms[1] == pytest.approx(norms[0], rel=0.5)


def test_the_second_task_of_the_example_is_learned(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(data, run, extension=EXAMPLES[1]))
    evaluated = run_command("trainer", "evaluate", str(run), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    ours = [event["loss"] for event in metrics(run, "train")]
    assert ours[-1] < ours[0]
    assert ours[0] > 1.2 * metrics(run, "eval")[0]["val_loss"], "the loss has a second term"


@example
@pytest.mark.parametrize("settings", [{}, ELASTIC, {"parallel": "fsdp"}], ids=["ddp", "elastic", "fsdp"])
def test_two_ranks_resume_an_example_with_the_same_bits(data: Path, tmp_path: Path, path: Path, settings: dict[str, Any]) -> None:
    """One rank has nearly the same losses, and the same bits if the run is elastic."""
    whole, stopped, one = tmp_path / "whole", tmp_path / "stopped", tmp_path / "one"
    own = {**settings, "extension": path, "model": {"residual_dropout": 0.1}}
    last_line = trained_by_ranks(tiny_config(data, whole, **own), 2)
    trained_by_ranks(tiny_config(data, stopped, **own, limits={"steps": 5}), 2)
    assert trained_by_ranks(tiny_config(data, stopped, **own), 2) == last_line
    last_line_of_one = train(tiny_config(data, one, **own))
    if settings == ELASTIC:
        assert last_line_of_one == last_line
    found, expected = ([float.fromhex(loss) for _, loss in losses(run)] for run in (whole, one))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return micro.loss_sum()", "line 1: training_step made no backward pass; call micro.backward"),
        ("micro.backward(micro.loss_sum())", "line 1: training_step returned a NoneType; it must return the sum of its losses"),
        ("1 / 0", "line 2, in training_step: ZeroDivisionError"),
    ],
)
def test_a_step_that_cannot_be_right_ends_the_training_with_its_place(data: Path, tmp_path: Path, body: str, message: str) -> None:
    extension = written(tmp_path, f"def training_step(micro):\n    {body}\n")
    with pytest.raises(ConfigError, match=message):
        train(tiny_config(data, tmp_path / "run", extension=extension))


def test_the_gap_to_the_validation_loss_is_unknown_for_a_step_of_an_extension(data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, tmp_path / "run", **SHORT, extension=EXAMPLES[1]))
    last = metrics(tmp_path / "run", "eval")[-1]
    assert last["train_loss"] > 0
    assert "gap" not in last

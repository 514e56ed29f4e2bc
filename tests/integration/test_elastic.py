"""`reproducibility = elastic` gives the same bits on 1, 2, 4 and 8 ranks. Plain addition would not."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import ExitCode
from tests.support.prepared import write_prepared
from tests.support.runs import losses, metrics, start_ranks, tiny_config
from trainer.config import TrainConfig

STEPS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def configured(data: Path, run: Path, reproducibility: str = "elastic", **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "reproducibility": reproducibility,
        "optim": {"kind": "muon"},  # with AdamW for all but the layers' matrices
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "limits": {"steps": STEPS},
        "schedule": {"decay_steps": STEPS},
        "eval": {"every_steps": 10, "sample_tokens": 0},
    }
    return tiny_config(data, run, **settings | changes)


def trained(config: TrainConfig, num_ranks: int) -> dict[str, Any]:
    """Train on these ranks, and return the digest of the weights, every loss and every gradient norm."""
    process = start_ranks(config, num_ranks)
    log = config.run.with_suffix(".log")
    assert process.wait(timeout=300) == ExitCode.DONE, log.read_text()
    last_line = [line for line in log.read_text().splitlines() if line.startswith("weights sha256:")][-1]
    return {
        "weights": last_line,
        "losses": losses(config.run),
        "norms": [float(event["grad_norm"]).hex() for event in metrics(config.run, "train")],
        "validation": {event["step"]: event["val_loss_hex"] for event in metrics(config.run, "eval") if event["step"] % 10 == 0},
    }


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(configured(data, tmp_path_factory.mktemp("alone") / "run"), 1)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_bits_do_not_depend_on_the_number_of_ranks(data: Path, tmp_path: Path, alone: dict[str, Any], num_ranks: int) -> None:
    assert len(alone["losses"]) == STEPS
    assert trained(configured(data, tmp_path / "run"), num_ranks) == alone


def test_a_run_goes_on_with_another_number_of_ranks(data: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    trained(configured(data, tmp_path / "run", limits={"steps": 13}), 4)
    assert trained(configured(data, tmp_path / "run"), 2) == alone


def test_gradients_added_by_all_reduce_would_have_other_bits(data: Path, tmp_path: Path) -> None:
    by_ranks = [trained(configured(data, tmp_path / f"{num_ranks}", "run"), num_ranks) for num_ranks in (1, 4)]
    assert by_ranks[0]["weights"] != by_ranks[1]["weights"]
    assert by_ranks[0]["losses"] != by_ranks[1]["losses"]

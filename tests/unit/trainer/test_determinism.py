from typing import Any

import pytest
import torch

from data_pipeline.errors import ConfigError
from tests.support.runs import tiny_config
from trainer.config import TrainConfig
from trainer.determinism import configure_determinism, flags, seed_micro_batch, threads_per_rank


def config(**changes: Any) -> TrainConfig:
    return tiny_config("data", "run", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "--reproducibility off"),
        ("NVIDIA_TF32_OVERRIDE", "1", "--tf32 true"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "--tf32 true"),
    ],
)
@pytest.mark.parametrize("reproducibility", ["run", "elastic"])
def test_an_environment_that_breaks_the_promise_is_refused(
    name: str, value: str, remedy: str, reproducibility: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} = {value}.*{remedy}"):
        configure_determinism(config(reproducibility=reproducibility))


def test_without_a_promise_the_environment_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    configure_determinism(config(reproducibility="off"))
    assert not torch.are_deterministic_algorithms_enabled()
    configure_determinism(config(reproducibility="off", tf32=True))
    assert torch.backends.cuda.matmul.allow_tf32
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    configure_determinism(config(tf32=True))
    assert torch.are_deterministic_algorithms_enabled()


def test_threads_do_not_follow_the_ranks_under_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_per_rank(config(threads=None)) == 7
    assert threads_per_rank(config(threads=None, reproducibility="elastic")) == 1
    assert threads_per_rank(config(threads=3, reproducibility="elastic")) == 3


def test_a_share_of_the_cores_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert threads_per_rank(config(threads=None)) == 2


def test_random_numbers_follow_seed_step_and_number_alone() -> None:
    def drawn(*counters: int) -> float:
        seed_micro_batch(*counters)
        return torch.rand(()).item()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({drawn(1, 2, 3), drawn(2, 2, 3), drawn(1, 3, 3), drawn(1, 2, 4)}) == 4
    drawn(2**63 - 1, 10**9, 10**6)


def test_only_variables_that_are_set_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setenv("SECRET_TOKEN", "canary")
    assert flags()["NCCL_ALGO"] == "Ring"
    assert not {"MKL_CBWR", "SECRET_TOKEN"} & flags().keys()

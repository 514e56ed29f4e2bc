from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.settings.dotted import flatten
from tests.support.runs import tiny_config
from trainer.config import GuardConfig
from trainer.config.optimization import OPTIMIZERS
from trainer.machine.determinism import flags
from trainer.model.forward import own_kernels
from trainer.model.linear import PRODUCTS
from trainer.training.start.identity import check_identity

ON_CPU: dict[str, Any] = {"device": "cpu, GenuineIntel AVX512", "reproducibility": "run", "threads": 2, "world_size": 2}
ON_GPU: dict[str, Any] = ON_CPU | {"device": "NVIDIA H100", "nodes": 1, "nccl": "2.27.7"}
ELASTIC: dict[str, Any] = {name: value for name, value in ON_GPU.items() if name != "world_size"} | {"reproducibility": "elastic"}
EARLIER: dict[str, Any] = {name: value for name, value in ON_GPU.items() if name not in ("nodes", "nccl")}
"""As a version recorded it that knew neither."""


def refused(recorded: dict[str, Any], now: dict[str, Any]) -> bool:
    try:
        check_identity(Path("run"), recorded, now, ())
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"nodes": 2}, "between GPUs"),
        ({"nccl": "2.28.3"}, "between GPUs"),
        ({"flags.NCCL_ALGO": "Tree"}, "between GPUs"),
        ({"flags.NCCL_NVLS_ENABLE": "0"}, "between GPUs"),
        ({"flags.PYTORCH_TUNABLEOP_ENABLED": "1"}, "everywhere"),
        ({"flags.TORCH_BLAS_PREFER_CUBLASLT": "1"}, "everywhere"),
        ({"threads": 4}, "on the CPU"),
    ],
)
def test_each_value_is_compared_where_it_changes_bits(changes: dict[str, Any], where: str) -> None:
    on_cpu = ON_CPU | {"nodes": 1, "nccl": None}
    assert refused(on_cpu, on_cpu | changes) == (where in ("everywhere", "on the CPU"))
    assert refused(ON_GPU, ON_GPU | changes) == (where in ("everywhere", "between GPUs"))
    one = ON_GPU | {"world_size": 1}
    assert refused(one, one | changes) == (where == "everywhere")
    assert refused(ELASTIC, ELASTIC | changes) == (where == "everywhere")


def test_a_run_of_an_earlier_version_resumes_and_keeps_what_it_recorded() -> None:
    now = ON_GPU | {"flags.NCCL_NVLS_ENABLE": "0", "flags.PYTORCH_TUNABLEOP_ENABLED": "1"}
    assert not refused(EARLIER, now)
    assert refused(EARLIER, now | {"flags.NCCL_ALGO": "Tree"})
    assert refused(EARLIER | {"flags.NCCL_ALGO": "Ring"}, now)
    assert not refused({**ELASTIC, "flags.NCCL_ALGO": "Ring"}, ELASTIC)
    assert refused(EARLIER, now | {"device": "NVIDIA A100"})


def test_a_run_with_muon_of_an_earlier_version_is_refused_and_one_with_adamw_resumes() -> None:
    now = ON_CPU | {"optimizer": OPTIMIZERS["muon"].bits}
    with pytest.raises(ConfigError, match=r"an older version started .*add --resume\.allow_changes optimizer"):
        check_identity(Path("run"), ON_CPU, now, ())
    check_identity(Path("run"), ON_CPU, now, ("optimizer",))
    assert OPTIMIZERS["adamw"].bits is None


def test_flags_of_kernels_are_recorded_and_paths_only_as_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "NCCL_MAX_CTAS": "16",
        "NCCL_TUNER_PLUGIN": "/home/me/libtuner.so",
        "PYTORCH_TUNABLEOP_TUNING": "0",
        "NCCL_DEBUG": "INFO",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = flags()
    assert (found["NCCL_MAX_CTAS"], found["PYTORCH_TUNABLEOP_TUNING"]) == ("16", "0")
    assert found["NCCL_TUNER_PLUGIN"].startswith("sha256:")
    assert "NCCL_DEBUG" not in found


@pytest.mark.parametrize("name", ["spike_factor", "spike_floor"])
def test_limits_of_the_loss_may_differ_at_a_resume_while_spikes_are_only_logged(name: str) -> None:
    def identity(**changes: object) -> dict[str, object]:
        return flatten({"guard": GuardConfig.model_validate(changes).model_dump()})

    check_identity(Path("run"), identity(), identity(**{name: 0.5}), ())
    for recorded, now in (({"spike": "skip"}, {"spike": "skip"}), ({"drop": "stop"}, {"drop": "stop"})):
        with pytest.raises(ConfigError, match=rf"guard\.{name} was"):
            check_identity(Path("run"), identity(**recorded), identity(**now, **{name: 0.5}), ())


def test_a_run_that_acts_on_spikes_resumes_with_the_new_default_of_their_factor() -> None:
    recorded, now = ({"guard.spike": "rollback", "guard.spike_factor": factor} for factor in (10.0, 4.2))
    check_identity(Path("run"), recorded, now, ())
    with pytest.raises(ConfigError, match=r"guard\.spike_factor was 10\.0 and is 5\.0"):
        check_identity(Path("run"), recorded, now | {"guard.spike_factor": 5.0}, ())


def test_a_run_on_a_cpu_that_has_no_library_of_products_on_record_is_refused_with_the_reason() -> None:
    now = ON_CPU | {"kernels": "products by oneDNN"}
    with pytest.raises(ConfigError, match=r"an older version started this run.*--resume.allow_changes kernels"):
        check_identity(Path("run"), ON_CPU, now, ())
    check_identity(Path("run"), ON_CPU, now, ("kernels",))
    check_identity(Path("run"), ON_GPU, ON_GPU | {"kernels": None}, ())
    with pytest.raises(ConfigError, match="kernels was products by MKL and is products by oneDNN"):
        check_identity(Path("run"), ON_CPU | {"kernels": "products by MKL"}, now, ())


@pytest.mark.parametrize(
    ("older", "names"),
    [
        ({"optim.kind": "muon"}, "kernels optimizer"),
        ({"optim.kind": "muon", "kernels": "products by oneDNN"}, "optimizer"),
        ({"attention": "varlen", "optimizer": "muon in stacks"}, "attention kernels"),
    ],
)
def test_a_run_of_an_older_version_is_refused_with_the_reason_whatever_it_lacks(older: dict[str, object], names: str) -> None:
    now = ON_CPU | {"kernels": "products by oneDNN", "optimizer": "muon in stacks", "optim.kind": "muon", "attention": "flex"}
    recorded = {name: value for name, value in now.items() if name not in ("kernels", "optimizer")} | older
    with pytest.raises(ConfigError, match=rf"an older version started this run.*--resume.allow_changes {names}\."):
        check_identity(Path("run"), recorded, now, ())
    check_identity(Path("run"), recorded, now, tuple(names.split()))


def test_what_follows_from_a_setting_that_may_change_may_change_too() -> None:
    recorded = ON_CPU | {"precision": "fp32", "kernels": "products by oneDNN"}
    check_identity(Path("run"), recorded, ON_CPU | {"precision": "fp16"}, ("precision",))
    with pytest.raises(ConfigError, match=r"precision was fp32 and is fp16\. .*--resume.allow_changes precision$"):
        check_identity(Path("run"), recorded, ON_CPU | {"precision": "fp16"}, ())


def test_the_library_of_products_is_recorded_for_fp32_on_a_cpu_only() -> None:
    config, cpu = tiny_config(Path("data"), Path("run"), precision="fp32"), torch.device("cpu")
    assert own_kernels(config, cpu) == f"products by {PRODUCTS}"
    assert own_kernels(config.model_copy(update={"precision": "bf16"}), cpu) is None
    assert own_kernels(config.model_copy(update={"compile": "on"}), cpu) is None
    assert own_kernels(config.model_copy(update={"compile": "layers"}), cpu), "the loss is not compiled"
    assert own_kernels(config, torch.device("cuda")) is None

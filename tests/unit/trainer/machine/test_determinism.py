import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from tests.support.runs import tiny_config
from trainer.config import TrainConfig
from trainer.machine.determinism import configure_determinism, device_name, flags, seed_micro_batch, threads_per_rank


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


def test_the_one_warning_of_inductor_that_nobody_can_act_on_is_silent() -> None:
    lines = "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure_determinism(config(compile="on"))
        warnings.warn(lines, UserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another warning", UserWarning, stacklevel=1)


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


def test_settings_of_the_compiler_are_recorded_except_for_places_hosts_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"MAX_AUTOTUNE": "1", "MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN,TRITON", "BENCHMARK_EPILOGUE_FUSION": "0"}
    others = {"CACHE_DIR": "/home/me", "REDIS_HOST": "canary", "FX_GRAPH_CACHE": "0", "COMPILE_THREADS": "4", "CPP_MARCH": "a/b c"}
    for name, value in (chosen | others).items():
        monkeypatch.setenv(f"TORCHINDUCTOR_{name}", value)
    assert {name: value for name, value in flags().items() if "INDUCTOR" in name} == {
        f"TORCHINDUCTOR_{name}": value for name, value in chosen.items()
    }


@pytest.mark.parametrize(("reproducibility", "deterministic"), [("run", True), ("elastic", True), ("off", False)])
def test_the_compiler_chooses_kernels_by_time_only_without_a_promise(reproducibility: str, deterministic: bool) -> None:
    configure_determinism(config(compile="on", reproducibility=reproducibility))
    assert torch._inductor.config.deterministic == deterministic
    configure_determinism(config())


X86 = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: a name\n\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\nprocessor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("cpuinfo", "level", "capabilities", "caches", "name"),
    [
        (X86, "AVX512", {"avx2": True}, ("48K", "2048K"), "cpu, GenuineIntel AVX512 48K+2048K"),
        (
            X86.replace("GenuineIntel", "AuthenticAMD"),
            "AVX512",
            {"avx2": True},
            ("48K", "2048K"),
            "cpu, AuthenticAMD AVX512 48K+2048K",
        ),
        (X86, "AVX2", {"avx2": True}, ("48K", "2048K"), "cpu, GenuineIntel AVX2 48K+2048K"),
        (
            X86,
            "AVX512",
            {"avx512_bf16": True, "amx_bf16": True, "amx_fp16": False, "l2_cache_size": 1},
            ("48K", "2048K"),
            "cpu, GenuineIntel AVX512 amx_bf16 avx512_bf16 48K+2048K",
        ),
        (X86, "AVX512", {"avx2": True}, ("48K", "1024K"), "cpu, GenuineIntel AVX512 48K+1024K"),
        (ARM, "SVE256", {"neon": True, "bf16": True, "sve": True}, (), "cpu, 0x41 0xd40 SVE256 bf16 sve"),
        (None, "DEFAULT", {}, (), "cpu, DEFAULT"),
    ],
    ids=("one", "maker", "level", "instructions", "caches", "arm", "unknown"),
)
def test_processors_whose_kernels_differ_have_other_names(
    cpuinfo: str | None,
    level: str,
    capabilities: dict[str, Any],
    caches: tuple[str, ...],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    for number, size in enumerate(caches):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        (folder / "size").write_text(f"{size}\n")
    monkeypatch.setattr("trainer.machine.environment._CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("trainer.machine.determinism._CACHES", tmp_path)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: level)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert device_name(torch.device("cpu")) == name

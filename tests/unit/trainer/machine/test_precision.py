"""The number format that `precision = auto` chooses."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_config
from trainer.distributed.group import Group
from trainer.machine import environment, precision
from trainer.machine.precision import choose_precision, has_amx, with_precision

GPU = Group(0, 1, 0, torch.device("cuda", 0))
CPU = Group(0, 1, 0, torch.device("cpu"))


def config(**changes: Any) -> Any:
    return tiny_config(Path("data"), Path("run"), **{"precision": "auto"} | changes)


@pytest.fixture(params=[True, False], ids=["fast bf16", "no fast bf16"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the GPU has bf16, and the CPU AMX."""
    has: bool = request.param
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation or has)
    monkeypatch.setattr(precision, "has_amx", lambda: has)
    return has


@pytest.mark.parametrize(
    ("device_type", "width", "all_fast", "expected"),
    [
        ("cuda", 32, True, "bf16"),
        ("cuda", 4096, False, "fp16"),
        ("cpu", 255, True, "fp32"),
        ("cpu", 256, True, "bf16"),
        ("cpu", 4096, False, "fp32"),
    ],
)
def test_it_is_the_fastest_format_of_the_device(device_type: str, width: int, all_fast: bool, expected: str) -> None:
    value, reason = choose_precision(device_type, width, all_fast=all_fast)
    assert value == expected
    assert reason


def test_a_new_run_gets_the_format_of_its_device_and_the_log_says_why(fast: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resolved, chosen = with_precision(config(), GPU, None)
    assert resolved.number_format == chosen.value == ("bf16" if fast else "fp16")
    assert f"precision = auto: {chosen.value}, because {chosen.reason}" in caplog.text
    wide = config(model={"layers": 1, "width": 256, "heads": 4, "context": 32})
    assert with_precision(wide, CPU, None)[0].number_format == ("bf16" if fast else "fp32")
    assert with_precision(config(), CPU, None)[0].number_format == "fp32"


def test_bf16_on_a_gpu_that_only_emulates_it_is_used_with_a_warning(fast: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert with_precision(config(precision="bf16"), GPU, None)[0].number_format == "bf16"
    assert with_precision(config(precision="bf16"), CPU, None)[0].number_format == "bf16"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (0 if fast else 1)
    assert all("fp16 is faster" in one for one in warnings)


def test_a_format_that_is_set_is_never_replaced(fast: bool) -> None:
    for value in ("fp32", "bf16", "fp16", "float8"):
        given = config(precision=value)
        resolved, chosen = with_precision(given, GPU, "fp16")
        assert resolved is given
        assert (chosen.setting, chosen.value) == (value, value)


@pytest.mark.parametrize("recorded", ["fp32", "fp16", "bf16"])
def test_a_resume_on_a_cpu_keeps_every_format(recorded: Any, fast: bool) -> None:
    resolved, chosen = with_precision(config(), CPU, recorded)
    assert (resolved.number_format, chosen.setting) == (recorded, "auto")


def test_a_resume_in_bf16_on_a_gpu_without_it_is_refused_with_the_flag_to_use(fast: bool) -> None:
    allowed = config(resume={"allow_changes": ["device", "precision"]})
    if fast:
        assert with_precision(config(), GPU, "bf16")[0].number_format == "bf16"
        assert with_precision(allowed, GPU, "fp16")[0].number_format == "fp16"
        return
    with pytest.raises(
        ConfigError, match=r"run: this run was started in bf16, .*resume in fp16 .* --resume\.allow_changes device precision"
    ):
        with_precision(config(), GPU, "bf16")
    assert with_precision(allowed, GPU, "bf16")[0].number_format == "fp16"
    assert with_precision(config(), GPU, "fp32")[0].number_format == "fp32"


def on_unequal_cpus(group: Group) -> str:
    """Return the format that a rank gets if only rank 0 has AMX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "has_amx", lambda: group.is_main)
        patch.setattr(precision, "_LEAST_WIDTH", 1)
        alone = replace(group, world_size=1)
        assert with_precision(config(), alone, None)[0].number_format == ("bf16" if group.is_main else "fp32")
        return with_precision(config(), group, None)[0].number_format


def test_all_ranks_get_the_format_of_the_slowest_one() -> None:
    assert run_ranks(on_unequal_cpus, 2) == ["fp32", "fp32"]


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", None, True),
        ("flags\t\t: fpu amx_bf16", "AVX512_CORE_BF16", False),
        ("flags\t\t: fpu amx_bf16", "avx512_core_amx", True),
        ("flags\t\t: fpu amx_bf16", "default", True),
        ("flags\t\t: fpu avx512_bf16 amx_tile", None, False),
        ("Features\t: asimd bf16 svebf16", None, False),
    ],
)
def test_amx_counts_only_if_onednn_may_use_it(
    flags: str, limit: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n\nprocessor\t: 1\n{flags}\n")
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert has_amx() is expected

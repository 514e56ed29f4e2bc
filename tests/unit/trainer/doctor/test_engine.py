"""Planted faults of engines, each with its row, its remedy and the exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer.doctor.check import Check, Severity, refuse_errors
from trainer.doctor.host import EngineReading, check_engine, check_gpu_container, read_engine
from trainer.doctor.inputs import Needs, Output

NEEDS = Needs("2.26", "13.0", {"13": "580"}, {})
WORKING = {
    "info --format {{.ServerVersion}}": Output(0, "28.1.0"),
    "info --format {{json .Runtimes}}": Output(0, '{"runc":{},"nvidia":{}}'),
    "compose version --short": Output(0, "v2.30.0"),
}


def said(answers: Mapping[str, Output], root: Path) -> EngineReading:
    def run(command: Sequence[str]) -> Output:
        return answers.get(" ".join(command[1:]), Output(None, ""))

    return read_engine(run, root)


def row(rows: Sequence[Check], name: str) -> Check:
    [found] = [one for one in rows if one.name == name]
    return found


def test_a_working_engine_has_no_problem(tmp_path: Path) -> None:
    rows = check_engine(said(WORKING, tmp_path), NEEDS, has_gpus=True)
    assert [one.severity for one in rows] == [Severity.OK] * 3
    assert row(rows, "Compose").found == "2.30.0"


@pytest.mark.parametrize(
    ("changed", "name", "found", "remedy"),
    [
        ({"compose version --short": Output(0, "2.20.3")}, "Compose", "2.20.3", "update the Compose plugin"),
        ({"compose version --short": Output(0, "2.9.1")}, "Compose", "2.9.1", "update the Compose plugin"),
        ({"compose version --short": Output(1, "", "unknown command")}, "Compose", "not found", "install the Compose plugin"),
        (
            {"info --format {{json .Runtimes}}": Output(0, '{"runc":{}}')},
            "NVIDIA toolkit",
            "no nvidia runtime",
            "nvidia-ctk runtime",
        ),
        (
            {"info --format {{.ServerVersion}}": Output(1, "", "Cannot connect to the Docker daemon")},
            "engine",
            "Cannot connect to the Docker daemon",
            "systemctl start docker",
        ),
        (
            {"info --format {{.ServerVersion}}": Output(1, "", "permission denied while trying to connect")},
            "engine",
            "permission denied",
            "group docker",
        ),
        (
            {"info --format {{.ServerVersion}}": Output(None, "")},
            "engine",
            "the program docker is not installed",
            "install-docker.sh",
        ),
        ({"info --format {{.ServerVersion}}": Output(None, "", "no answer in 20 s")}, "engine", "no answer in 20 s", "start it"),
    ],
    ids=["old Compose", "9 is less than 26", "no Compose", "no toolkit", "stopped", "no permission", "no engine", "hangs"],
)
def test_a_fault_of_the_engine_is_an_error_with_its_remedy(
    tmp_path: Path, changed: Mapping[str, Output], name: str, found: str, remedy: str
) -> None:
    rows = check_engine(said({**WORKING, **changed}, tmp_path), NEEDS, has_gpus=True)
    fault = row(rows, name)
    assert (fault.severity, found in fault.found, remedy in fault.remedy) == (Severity.ERROR, True, True), fault
    with pytest.raises(ConfigError, match=name):
        refuse_errors(rows)


def test_without_gpus_no_toolkit_is_needed_and_a_cdi_file_counts_as_one(tmp_path: Path) -> None:
    answers = {**WORKING, "info --format {{json .Runtimes}}": Output(0, '{"runc":{}}')}
    assert [one.name for one in check_engine(said(answers, tmp_path), NEEDS, has_gpus=False)] == ["engine", "Compose"]
    (tmp_path / "etc/cdi").mkdir(parents=True)
    (tmp_path / "etc/cdi/nvidia.yaml").touch()
    assert row(check_engine(said(answers, tmp_path), NEEDS, has_gpus=True), "NVIDIA toolkit").severity is Severity.OK


@pytest.mark.parametrize(
    ("message", "cause", "remedy"),
    [
        (
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            "no NVIDIA runtime",
            "install the NVIDIA Container Toolkit",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch", "driver and its libraries differ", "restart the machine"),
        ("nvidia-container-cli: initialization error: nvml error", "cannot use the driver", "run nvidia-smi on the host"),
        ("something else", "something else", "by hand"),
    ],
)
def test_a_container_that_gets_no_gpu_says_why(message: str, cause: str, remedy: str) -> None:
    found = check_gpu_container(lambda _: Output(125, "", message), "trainer:x")
    assert (found.severity, cause in found.found, remedy in found.remedy) == (Severity.ERROR, True, True), found
    assert message in found.found


def test_a_container_with_gpus_has_no_network() -> None:
    calls: list[str] = []

    def run(command: Sequence[str]) -> Output:
        calls.append(" ".join(command))
        return Output(0, "GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100")

    assert check_gpu_container(run, "trainer:x").found == "2 seen"
    assert calls[-1].startswith("docker run --rm --network none --gpus all")

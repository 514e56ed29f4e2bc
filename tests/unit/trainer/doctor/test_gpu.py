"""What nvidia-smi prints, and planted faults of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.errors import ConfigError
from trainer.doctor.check import Check, Severity, refuse_errors
from trainer.doctor.gpu import DriverReading, check_gpus, check_links, formats_of, gpus_in, links_in, read_gpus
from trainer.doctor.inputs import Needs, Output

NEEDS = Needs("2.26", "13.0", {"12": "525", "13": "580"}, {})
H100 = "{index}, NVIDIA H100 80GB HBM3, {driver}, 81559, 9.0, 1980, 1980, Enabled, 0, 0x0000000000000001, 34"
TWO = "\n".join(H100.format(index=index, driver="580.65.06") for index in (0, 1))
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPXB\t0-31\t0\nGPU1\tNV12\t X \tNODE\tPXB\t0-31\t0\nGPU2\tSYS\tNODE\t X \tSYS\t32-63\t1\n"
    "NIC0\tPXB\tPXB\tSYS\t X \n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)


def reading(text: str, topology: str = "") -> DriverReading:
    def run(command: Sequence[str]) -> Output:
        return Output(0, topology) if command[1] == "topo" else Output(0, text)

    return read_gpus(run, ["/dev/nvidia0"])


def named(rows: Sequence[Check], name: str) -> Check:
    [found] = [one for one in rows if one.name == name]
    return found


def test_a_gpu_has_its_model_memory_capability_and_formats() -> None:
    rows = check_gpus(reading(TWO), NEEDS)
    assert {one.severity for one in rows} == {Severity.OK}
    found = named(rows, "GPU 1").found
    assert found == "NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0, tensor cores: fp8, bf16, tf32, fp16"
    assert named(rows, "driver").needed == "580 or later, for CUDA 13.0"
    assert named(rows, "GPU 0 clocks").found == "1980 of 1980 MHz, 34 °C"


@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        ("", ()),
        ("6.1", ()),
        ("7.0", ("fp16",)),
        ("7.5", ("fp16",)),
        ("8.0", ("bf16", "tf32", "fp16")),
        ("8.6", ("bf16", "tf32", "fp16")),
        ("8.9", ("fp8", "bf16", "tf32", "fp16")),
        ("12.0", ("fp4", "fp8", "bf16", "tf32", "fp16")),
    ],
)
def test_the_formats_of_the_tensor_cores_follow_from_the_compute_capability(capability: str, formats: tuple[str, ...]) -> None:
    assert formats_of(capability) == formats


def test_a_driver_that_is_too_old_is_an_error_with_the_version_that_is_needed() -> None:
    rows = check_gpus(reading(H100.format(index=0, driver="570.86.10")), NEEDS)
    old = named(rows, "driver")
    assert (old.severity, old.found) == (Severity.ERROR, "570.86.10")
    assert "install driver 580 or later" in old.remedy
    with pytest.raises(ConfigError, match="driver"):
        refuse_errors(rows)
    assert named(check_gpus(reading(H100.format(index=0, driver="570.86.10")), NEEDS, "12.6"), "driver").severity is Severity.OK
    unwanted = check_gpus(reading(H100.format(index=0, driver="570.86.10")), NEEDS, wanted=False)
    assert named(unwanted, "driver").severity is Severity.NOTE


def test_a_driver_that_does_not_respond_is_an_error_with_its_words() -> None:
    broken = read_gpus(lambda _: Output(18, "Failed to initialize NVML: Driver/library version mismatch"), [])
    [row] = check_gpus(broken, NEEDS)
    assert row.severity is Severity.ERROR
    assert "Driver/library version mismatch" in row.found
    assert "restart the machine" in row.remedy


def test_a_gpu_without_nvidia_smi_is_an_error_and_a_machine_without_a_gpu_is_none() -> None:
    missing = read_gpus(lambda _: Output(None, ""), ["/dev/nvidia0"])
    assert check_gpus(missing, NEEDS)[0].severity is Severity.ERROR
    none = read_gpus(lambda _: Output(None, ""), [])
    assert check_gpus(none, NEEDS)[0].severity is Severity.NOTE


def test_an_older_nvidia_smi_that_lacks_a_field_still_gives_the_driver() -> None:
    def run(command: Sequence[str]) -> Output:
        if "compute_cap" in command[1]:
            return Output(2, 'Field "compute_cap" is not a valid field to query.')
        return Output(0, "0, Tesla T4, 450.80.02, 15109")

    [gpu] = read_gpus(run, []).gpus
    assert (gpu.name, gpu.driver, gpu.memory_mib, gpu.capability) == ("Tesla T4", "450.80.02", 15109.0, None)


def test_heat_and_memory_errors_are_warnings_and_a_power_cap_is_a_note() -> None:
    line = "0, NVIDIA A100-SXM4-80GB, 580.65.06, 81920, 8.0, 900, 1410, Enabled, 3, 0x0000000000000040, 91"
    rows = check_gpus(reading(line), NEEDS)
    assert named(rows, "GPU 0 ECC").severity is Severity.WARNING
    assert "nvidia-smi --gpu-reset -i 0" in named(rows, "GPU 0 ECC").remedy
    assert named(rows, "GPU 0 clocks").severity is Severity.WARNING
    assert "hw_thermal" in named(rows, "GPU 0 clocks").found
    capped = check_gpus(reading(line.replace("0x0000000000000040", "0x0000000000000004")), NEEDS)
    assert named(capped, "GPU 0 clocks").severity is Severity.NOTE


def test_values_that_a_gpu_does_not_report_and_lines_that_are_none_are_left_out() -> None:
    text = (
        "0, NVIDIA GeForce RTX 4090, 580.65.06, 24564, 8.9, [N/A], [N/A], [N/A], [N/A], [Unknown Error], N/A\nUnable to determine"
    )
    [gpu] = gpus_in(text)
    assert (gpu.ecc, gpu.throttle, gpu.temperature_c, gpu.sm_clock_mhz) == (None, (), None, None)


def test_the_links_of_all_pairs_are_read_from_the_topology() -> None:
    assert links_in(TOPOLOGY) == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "NODE"}
    assert links_in("") == {}


def test_slow_links_are_a_note_and_missing_peer_access_is_a_warning() -> None:
    found = reading(TWO, TOPOLOGY)
    [row] = check_links(found)
    assert (row.severity, "NODE, NV12, SYS between 3 pairs" in row.found) == (Severity.NOTE, True)
    [row] = check_links(found, lambda one, other: (one, other) != (0, 2))
    assert (row.severity, "missing for 1" in row.found, "/dev/shm" in row.remedy) == (Severity.WARNING, True, True)
    nvlink = reading(TWO, "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n")
    assert check_links(nvlink, lambda *_: True)[0].severity is Severity.OK
    assert check_links(reading(TWO.splitlines()[0])) == []

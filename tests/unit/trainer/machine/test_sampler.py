import mmap
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.hardware import throttle_reasons
from trainer.machine import sampler as gpus
from trainer.machine import sampler as sampler_module
from trainer.machine.sampler import GpuReading, Gpus, HardwareReading, HardwareSampler, Host, HostReading, KernelLog, xids_in
from trainer.runs.events import HardwareEvent

UUID = "5f0e6f2a-1c7b-4f5d-9a57-6b1f8f7d2f10"
OTHER_UUID = "0c6f8a52-9b1e-4e0f-8d7c-2f4b7b1f9a11"
H100 = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=61_742_252_032, total=85_520_809_984),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=98, memory=54),
    "nvmlDeviceGetCurrentClocksEventReasons": 0x24,
    "nvmlDeviceGetTemperature": 66,
    "nvmlDeviceGetPowerUsage": 698_412,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetClockInfo": {pynvml.NVML_CLOCK_SM: 1665, pynvml.NVML_CLOCK_MEM: 2619},
    "nvmlDeviceGetTotalEccErrors": {pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED: 3, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: 0},
}
GEFORCE = H100 | {
    "nvmlDeviceGetName": b"NVIDIA GeForce RTX 4090",
    "nvmlDeviceGetTotalEccErrors": pynvml.NVMLError_NotSupported(),
    "nvmlDeviceGetEnforcedPowerLimit": pynvml.NVMLError_NoPermission(),
    "nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVMLError_Unknown(),
}
LOST = H100 | {"nvmlDeviceGetTemperature": pynvml.NVMLError_GpuIsLost()}


class RecordedNvml:
    """NVML with recorded results, one set for each device. All other names are those of the library."""

    def __init__(self, *devices: dict[str, Any], events: tuple[int, ...] | None = None) -> None:
        self._devices = devices
        self._events = None if events is None else list(events)
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            return getattr(pynvml, name)
        return lambda handle, *arguments: self._answer(self._devices[handle][name], arguments)

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return [f"GPU-{UUID}", f"GPU-{OTHER_UUID}"].index(uuid)

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        if self._events is None:
            raise pynvml.NVMLError_NotSupported
        return "events"

    def nvmlDeviceRegisterEvents(self, _handle: int, kind: int, _events: str) -> None:  # noqa: N802
        assert kind == pynvml.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, _events: str, _timeout: int) -> Any:  # noqa: N802
        if not self._events:
            raise pynvml.NVMLError_Timeout
        return SimpleNamespace(eventData=self._events.pop(0))

    @staticmethod
    def _answer(answer: Any, arguments: tuple[Any, ...]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer[arguments[0]] if isinstance(answer, dict) else answer


def recorded(monkeypatch: pytest.MonkeyPatch, *devices: dict[str, Any], events: tuple[int, ...] | None = None) -> RecordedNvml:
    nvml = RecordedNvml(*devices, events=events)
    monkeypatch.setattr(gpus, "pynvml", nvml)
    return nvml


class Fixed:
    """A host whose reading is always the same or always fails."""

    def __init__(self, reading: HostReading | Exception) -> None:
        self.reading: HostReading | Exception = reading
        self.calls = 0

    def read(self) -> HostReading:
        self.calls += 1
        if isinstance(self.reading, Exception):
            raise self.reading
        return self.reading


HOST = HostReading(1000.0, 800.0, 16000.0, 0.5, 100.0)


def test_a_gpu_tells_everything_in_the_units_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, H100)
    [gpu] = Gpus([UUID]).read()
    assert gpu == GpuReading(
        0,
        "NVIDIA H100 80GB HBM3",
        utilisation=0.98,
        memory_used_mib=61_742_252_032 / 2**20,
        memory_total_mib=85_520_809_984 / 2**20,
        temperature_c=66.0,
        power_w=698.412,
        power_limit_w=700.0,
        sm_clock_mhz=1665.0,
        memory_clock_mhz=2619.0,
        throttle=("power_cap", "sw_thermal"),
        ecc_corrected=3,
        ecc_uncorrected=0,
    )


def test_what_a_gpu_does_not_know_is_left_out_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, H100, GEFORCE)
    _, gpu = Gpus([UUID, OTHER_UUID]).read()
    assert (gpu.name, gpu.index, gpu.temperature_c) == ("NVIDIA GeForce RTX 4090", 1, 66.0)
    assert gpu.ecc_corrected is gpu.ecc_uncorrected is gpu.power_limit_w is gpu.throttle is None
    [shown] = HardwareEvent.of(1, HardwareReading((gpu,), HOST), None).gpus
    assert "ecc_corrected" not in shown
    assert shown["answers"] is True


def test_a_gpu_that_is_lost_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, LOST, H100)
    lost, well = Gpus([UUID, OTHER_UUID]).read()
    assert (lost.answers, lost.utilisation) == (False, None)
    assert (well.answers, well.utilisation) == (True, 0.98)


def test_only_the_gpus_of_the_run_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = recorded(monkeypatch, H100, GEFORCE)
    gpus = Gpus([UUID])
    assert [gpu.name for gpu in gpus.read()] == ["NVIDIA H100 80GB HBM3"]
    gpus.close()
    assert nvml.open == 0


def test_xids_come_from_the_driver_s_events_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, H100, events=(79, 48))
    gpus = Gpus([UUID])
    assert (gpus.xids(), gpus.xids()) == ((79, 48), ())


def test_a_gpu_without_events_has_no_xids_there(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, H100)
    assert Gpus([UUID]).xids() == ()


def test_without_a_driver_there_are_no_gpus_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    assert Gpus([UUID]).read() == ()
    assert "GPUs are not monitored" in caplog.text
    caplog.clear()
    assert Gpus([]).read() == ()
    assert not caplog.text


def test_throttle_reasons_have_the_names_of_their_bits() -> None:
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x1) == ("idle",)
    assert throttle_reasons(0x8 | 0x40 | 0x80) == ("hw_slowdown", "hw_thermal", "hw_power_brake")
    assert throttle_reasons(0x400) == ("0x400",)


@given(st.integers(0, 2**64 - 1))
def test_every_bit_has_a_name_of_its_own(bits: int) -> None:
    names = throttle_reasons(bits)
    assert len(names) == len(set(names)) == bits.bit_count()


def test_xids_are_found_in_the_kernel_s_log() -> None:
    log = (
        "3,1523,918273645,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "6,1524,918273700,-;usb 1-1: new device NVRM\n"
        "4,1525,918273801,-;NVRM: Xid (PCI:0000:86:00): 48, pid=4242, name=python, An uncorrectable double bit error\n"
    )
    assert xids_in(log) == (79, 48)


@given(st.text(max_size=200))
def test_any_text_can_be_searched_for_xids(text: str) -> None:
    assert isinstance(xids_in(text), tuple)


def test_a_kernel_log_is_read_from_its_end_on(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("NVRM: Xid (PCI:0000:3b:00): 13, old\n")
    log = KernelLog(path)
    assert log.xids() == ()
    with path.open("a") as file:
        file.write("NVRM: Xid (PCI:0000:3b:00): 79, new\n")
    assert (log.xids(), log.xids()) == ((79,), ())
    log.close()
    assert log.xids() == ()


def test_a_kernel_log_that_may_not_be_read_has_no_xids(tmp_path: Path) -> None:
    assert KernelLog(tmp_path / "missing").xids() == ()


def test_the_host_is_read_and_memory_counts_where_it_is_taken(tmp_path: Path) -> None:
    host = Host(tmp_path, os.getpid())
    before = host.read()
    kept = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # new memory of the process
    for _ in range(64):
        kept.write(b"x" * 2**20)
    after = host.read()
    assert after.private_mib - before.private_mib == pytest.approx(64, abs=8)
    assert after.rss_mib >= after.private_mib > 0
    assert after.cpu is not None
    assert 0 <= after.cpu <= 1
    assert after.available_mib > 0
    assert after.disk_free_gb > 0
    kept.close()


def test_a_file_that_is_mapped_and_read_is_no_private_memory(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "shard"
    path.write_bytes(bytes(64 * 2**20))
    host = Host(tmp_path, os.getpid())
    before = host.read()
    mapped = numpy.memmap(path, mode="r")
    assert int(mapped.sum()) == 0
    after = host.read()
    assert after.rss_mib - before.rss_mib > 56
    assert abs(after.private_mib - before.private_mib) < 8


def test_a_process_that_is_gone_counts_nothing(tmp_path: Path) -> None:
    assert Host(tmp_path, 2**22 - 1).read().rss_mib == 0


def test_disk_rates_are_unknown_at_first_and_where_they_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, os.getpid())
    assert host.read().disk_written_mb_per_s is None
    monkeypatch.setattr(sampler_module.psutil, "disk_io_counters", lambda: None)
    assert host.read().disk_read_mb_per_s is None


def test_readings_are_taken_without_waiting_and_each_once() -> None:
    host = Fixed(HOST)
    with HardwareSampler(Gpus(()), host, 0.01).running() as sampler:  # type: ignore[arg-type]
        until = time.monotonic() + 30
        taken: list[HardwareReading] = []
        while len(taken) < 3 and time.monotonic() < until:
            taken += sampler.take()
            time.sleep(0.005)
    assert len(taken) >= 3
    assert taken[0] == HardwareReading((), HOST)
    calls = host.calls
    assert len(taken) + len(sampler.take()) == calls
    time.sleep(0.05)
    assert host.calls == calls, "the thread has ended"


def test_a_machine_that_cannot_be_read_is_told_once_and_watched_again_when_it_can(caplog: pytest.LogCaptureFixture) -> None:
    host = Fixed(OSError("stale file handle"))
    with HardwareSampler(Gpus(()), host, 0.001).running() as sampler:  # type: ignore[arg-type]
        until = time.monotonic() + 30
        while host.calls < 3 and time.monotonic() < until:
            time.sleep(0.005)
        assert sampler.take() == []
        host.reading = HOST
        while not (taken := sampler.take()) and time.monotonic() < until:
            time.sleep(0.005)
    assert taken[0].host == HOST
    assert caplog.text.count("hardware is not monitored for now: OSError: stale file handle; training continues") == 1


def test_an_xid_that_the_driver_tells_is_not_told_again_out_of_the_kernel_s_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(monkeypatch, H100, events=(79,))
    path = tmp_path / "kmsg"
    path.touch()
    sampler = HardwareSampler(Gpus([UUID]), Fixed(HOST), 1, KernelLog(path))  # type: ignore[arg-type]
    path.write_text("NVRM: Xid (PCI:0000:3b:00): 79, pid=7\n")
    assert [sampler.read().xids, sampler.read().xids] == [(79,), ()]


def test_an_xid_waits_for_a_reading_that_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, H100, events=(79,))
    host = Fixed(OSError("stale file handle"))
    sampler = HardwareSampler(Gpus([UUID]), host, 1)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="stale"):
        sampler.read()
    host.reading = HOST
    assert sampler.read().xids == (79,)


def test_the_use_of_the_processors_is_unknown_at_the_first_reading(tmp_path: Path) -> None:
    host = Host(tmp_path, os.getpid())
    assert host.read().cpu is None
    assert host.read().cpu is not None


def test_xids_of_the_kernel_s_log_stand_in_where_the_driver_tells_none(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    sampler = HardwareSampler(Gpus(()), Fixed(HOST), 1, KernelLog(path))  # type: ignore[arg-type]
    path.write_text("NVRM: Xid (PCI:0000:3b:00): 31, pid=7\n")
    assert sampler.read().xids == (31,)
    assert sampler.read() == HardwareReading((), HOST), "an Xid is reported once"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_read() -> None:
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    gpus = Gpus([uuid])
    values = torch.ones(64 * 2**20, device="cuda")
    [gpu] = gpus.read()
    assert gpu.answers
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.memory_used_mib is not None
    assert gpu.memory_used_mib > values.numel() * 4 / 2**20
    assert gpu.temperature_c is not None
    assert gpus.xids() == ()
    gpus.close()

"""Checks of the GPUs as the driver describes them: driver, model, clocks, memory errors, links. Standard library alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from common.hardware import HARMFUL_REASONS, throttle_reasons
from trainer.doctor.check import Check, Severity, check
from trainer.doctor.inputs import Needs, Runner, at_least

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_FORMATS = ((10, 0, "fp4"), (8, 9, "fp8"), (8, 0, "bf16"), (8, 0, "tf32"), (7, 0, "fp16"))
"""The first compute capability whose tensor cores have a number format."""
_REPAIR = "repair the driver: restart the machine after an update of the driver, or install it again"


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _fact(query: str, read: Callable[[str], Any] = str, default: Any = None) -> Any:
    return field(default=default, metadata={"query": query, "read": read})


@dataclass(frozen=True)
class Gpu:
    """What the driver reports of one GPU. A value is None if it does not."""

    index: int = _fact("index", int)
    name: str = _fact("name", default="unknown")
    driver: str = _fact("driver_version", default="")
    memory_mib: float | None = _fact("memory.total", _number)
    capability: str | None = _fact("compute_cap")  # compute capability, such as `9.0`
    sm_clock_mhz: float | None = _fact("clocks.sm", _number)
    max_sm_clock_mhz: float | None = _fact("clocks.max.sm", _number)
    ecc: str | None = _fact("ecc.mode.current")  # `Enabled` or `Disabled`
    uncorrected_errors: float | None = _fact("ecc.errors.uncorrected.volatile.total", _number)
    """Memory errors that ECC could not correct, since the driver was loaded."""
    throttle: tuple[str, ...] = _fact(
        "clocks_throttle_reasons.active",
        lambda bits: throttle_reasons(int(bits, 16)) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", bits) else (),
        (),
    )
    """Reasons why the clock rate is limited, with the names of `throttle_reasons`."""
    temperature_c: float | None = _fact("temperature.gpu", _number)


_FACTS = {fact.metadata["query"]: fact for fact in fields(Gpu)}
_BASIC = tuple(_FACTS)[:4]  # The facts that every driver has. nvidia-smi refuses a query with one that it does not know.


@dataclass(frozen=True)
class DriverReading:
    has_program: bool = False  # whether there is an nvidia-smi
    error: str = ""  # what nvidia-smi says if it fails
    signs: tuple[str, ...] = ()  # paths that exist only on a machine with a GPU
    gpus: tuple[Gpu, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The kind of link of each pair of GPUs, such as `NV12` or `SYS`; see `nvidia-smi topo -m`."""


def read_gpus(run: Runner, signs: Sequence[str]) -> DriverReading:
    for queries in (tuple(_FACTS), _BASIC):
        said = run(("nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"))
        if "not a valid field" not in f"{said.text} {said.error}":
            break
    if said.is_missing:
        return DriverReading(signs=tuple(signs))
    if said.code != 0:
        reason = " ".join(f"{said.text} {said.error}".split()) or f"exit code {said.code}"
        return DriverReading(has_program=True, error=reason, signs=tuple(signs))
    gpus = gpus_in(said.text, queries)
    topology = run(("nvidia-smi", "topo", "-m")) if len(gpus) > 1 else None
    links = links_in(topology.text) if topology is not None and topology.code == 0 else {}
    return DriverReading(True, "", tuple(signs), gpus, links)


def gpus_in(text: str, queries: Sequence[str] = tuple(_FACTS)) -> tuple[Gpu, ...]:
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(queries) and cells[0].isdecimal():
            known = {query: cell for query, cell in zip(queries, cells, strict=True) if cell and not cell.startswith(("[", "N/A"))}
            gpus.append(Gpu(**{_FACTS[query].name: _FACTS[query].metadata["read"](cell) for query, cell in known.items()}))
    return tuple(gpus)


def links_in(text: str) -> dict[tuple[int, int], str]:
    links: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for line in _ESCAPE.sub("", text).splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if not columns and "GPU0" in cells[1:]:
            columns = cells[1:]
        elif columns and (own := re.fullmatch(r"GPU(\d+)", cells[0])):
            for column, link in zip(columns, cells[1:], strict=False):
                other = re.fullmatch(r"GPU(\d+)", column)
                if other and link and int(own[1]) < int(other[1]):
                    links[int(own[1]), int(other[1])] = link
    return links


def formats_of(capability: str) -> tuple[str, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", capability)[:2]]
    return tuple(name for major, minor, name in _FORMATS if numbers >= [major, minor])


@check("GPUs", "host", "machine")
def check_gpus(gpus: DriverReading, needs: Needs, cuda: str | None = None, *, wanted: bool = True) -> list[Check]:
    """Return the rows of the driver and of each GPU. If the user chose the CPU, no row is worse than a note."""
    worst = Severity.ERROR if wanted else Severity.NOTE
    if not gpus.has_program:
        if not gpus.signs:
            return [Check("GPU", "none; training uses the CPU", Severity.NOTE)]
        needed = "nvidia-smi, a program of the driver"
        remedy = "install the tools of the driver, or choose the CPU (GPUS=none in containers, --device cpu natively)"
        return [Check("driver", f"a GPU ({gpus.signs[0]}), but no nvidia-smi", worst, needed, remedy)]
    if gpus.error:
        return [Check("driver", f"nvidia-smi fails: {gpus.error}", worst, "a driver that responds", _REPAIR)]
    if not gpus.gpus:
        return [Check("GPU", "nvidia-smi lists no GPU; training uses the CPU", Severity.NOTE)]
    driver, floor = gpus.gpus[0].driver, needs.driver(cuda)
    needed = f"{floor} or later, for CUDA {cuda or needs.cuda}" if floor else ""
    row = Check("driver", driver or "unknown", Severity.OK, needed)
    if floor and not at_least(floor, driver):
        base = "use a base image for older drivers (docs/containers.md, 'Another base image')"
        remedy = f"install driver {floor} or later, or {base}"
        row = Check("driver", driver or "unknown", worst, needed, remedy)
    return [row, *(row for gpu in gpus.gpus for row in _rows(gpu))]


def _rows(gpu: Gpu) -> list[Check]:
    name = f"GPU {gpu.index}"
    memory = "" if gpu.memory_mib is None else f", {gpu.memory_mib / 1024:.0f} GiB"
    capability = "" if gpu.capability is None else f", compute capability {gpu.capability}"
    formats = formats_of(gpu.capability or "")
    cores = f", tensor cores: {', '.join(formats)}" if formats else ", no tensor cores" if gpu.capability else ""
    severity, needed, remedy = Severity.OK, "", ""
    if gpu.capability and "bf16" not in formats:
        severity, needed = Severity.NOTE, "8.0 or higher for bf16"
        remedy = "train with precision = fp16, which precision = auto chooses"
    rows = [Check(name, f"{gpu.name}{memory}{capability}{cores}", severity, needed, remedy)]
    if gpu.ecc is not None and gpu.uncorrected_errors:
        found = f"{gpu.uncorrected_errors:.0f} uncorrected memory errors since the driver was loaded"
        remedy = f"reset the GPU (nvidia-smi --gpu-reset -i {gpu.index}) or restart; if they return, replace the GPU"
        rows.append(Check(f"{name} ECC", found, Severity.WARNING, "none", remedy))
    elif gpu.ecc is not None and gpu.ecc != "Enabled":
        remedy = f"nvidia-smi --ecc-config=1 -i {gpu.index}, then restart"
        rows.append(Check(f"{name} ECC", "off, so memory errors are not detected", Severity.NOTE, "on", remedy))
    elif gpu.ecc is not None:
        rows.append(Check(f"{name} ECC", "on, no uncorrected errors"))
    if gpu.sm_clock_mhz is None or gpu.max_sm_clock_mhz is None:
        return rows
    limits = [reason for reason in gpu.throttle if reason != "idle"]
    heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c:.0f} °C"
    why = f", limited by {', '.join(limits)}" if limits else ""
    found = f"{gpu.sm_clock_mhz:.0f} of {gpu.max_sm_clock_mhz:.0f} MHz{heat}{why}"
    if HARMFUL_REASONS & set(limits):
        remedy = "look at cooling, power supply and power limit: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
        return [*rows, Check(f"{name} clocks", found, Severity.WARNING, "no limit by heat or power supply", remedy)]
    return [*rows, Check(f"{name} clocks", found, Severity.NOTE if limits else Severity.OK)]


@check("GPUs", "host", "machine")
def check_links(gpus: DriverReading, can_access: Callable[[int, int], bool] | None = None) -> list[Check]:
    if len(gpus.gpus) < 2 or not gpus.links:
        return []
    slow = sorted({link for link in gpus.links.values() if not link.startswith("NV")})
    kinds = ", ".join(sorted(set(gpus.links.values())))
    pairs = "pair" if len(gpus.links) == 1 else "pairs"
    blocked = [pair for pair in gpus.links if can_access is not None and not can_access(*pair)]
    access = "" if can_access is None else "; peer access " + (f"missing for {len(blocked)}" if blocked else "for all")
    found = f"{kinds} between {len(gpus.links)} {pairs} of GPUs{access}"
    needed = "NVLink (NV…), or one PCIe switch (PIX, PXB), and peer access"
    if blocked:
        remedy = "give the container all GPUs of a board; on bare metal, turn off IOMMU and PCIe ACS; NCCL copies through /dev/shm"
        return [Check("GPU links", found, Severity.WARNING, needed, remedy)]
    if "SYS" in slow:
        remedy = "choose GPUs of one CPU socket with CUDA_VISIBLE_DEVICES, as `nvidia-smi topo -m` groups them"
        return [Check("GPU links", found, Severity.NOTE, needed, remedy)]
    return [Check("GPU links", found, Severity.OK, needed)]

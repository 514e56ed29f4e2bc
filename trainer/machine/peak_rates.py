"""Model FLOPs utilisation (MFU): the share of a GPU's published peak rate that training reaches.

The table holds dense rates. NVIDIA's newer data sheets print tensor rates with 2:4 sparsity, which training does not use. The
table has these rates as the printed number divided by two. Rates of tensor cores are those with fp32 accumulation, which torch
uses; on GeForce cards it halves the rate. The peak of a GPU that is not in the table is unknown. A part of a name is not enough
for a match, because the names of laptop GPUs, MIG slices and vGPUs contain the name of a faster device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config import Precision

RateKind = Literal["fp32", "tf32", "bf16", "fp16", "float8"]


@dataclass(frozen=True)
class PeakRates:
    """In 10^12 floating-point operations per second, from the data sheet of the GPU, without sparsity."""

    names: tuple[str, ...]  # complete names as `torch.cuda.get_device_name` returns them
    source: str
    half: float  # rate in fp16, and in bf16 if the GPU has it
    tf32: float | None  # a rate is None if this GPU has no such unit, or the source gives no rate
    fp32: float  # rate of the CUDA cores
    float8: float | None = None
    has_bf16: bool = True

    def rate(self, kind: RateKind) -> float | None:
        bf16 = self.half if self.has_bf16 else None
        return {"bf16": bf16, "fp16": self.half, "tf32": self.tf32, "fp32": self.fp32, "float8": self.float8}[kind]


_H100 = 1979 / 2, 989 / 2, 67, 3958 / 2  # the SXM boards with this chip have the same rates, and other memory
_H100_PCIE = 1513 / 2, 756 / 2, 51, 3026 / 2
_H100_NVL = 1671 / 2, 835 / 2, 60, 3341 / 2
_A100 = 312, 156, 19.5
PEAK_RATES: tuple[PeakRates, ...] = (
    # Turing: no bf16, no TF32, no sparsity. Volta is missing, because the PyTorch builds of this project have no kernels for it.
    PeakRates(("Tesla T4",), "T4 data sheet, 2019", 65, None, 8.1, has_bf16=False),
    # Ampere. SXM and PCIe boards of the A100 have the same rates; only their power limits differ. The A800 has slower NVLink.
    PeakRates(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        "A100 data sheet, 2021",
        *_A100,
    ),
    PeakRates(("NVIDIA A800-SXM4-40GB", "NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"), "A800 data sheet, 2022", *_A100),
    PeakRates(
        ("NVIDIA A100-SXM-64GB",),
        "A100 data sheet, 2021, times 124 / 108: the boards of the computer Leonardo have more SMs (Turisini et al., 2023)",
        312 * 124 / 108,
        156 * 124 / 108,
        22.4,
    ),
    PeakRates(("NVIDIA A30",), "A30 data sheet, 2021", 165, 82, 10.3),
    PeakRates(("NVIDIA A10",), "A10 data sheet, 2021", 125, 62.5, 31.2),
    PeakRates(("NVIDIA A10G",), "A10G data sheet (AWS), 2022", 70, 35, 35),
    PeakRates(("NVIDIA A40",), "A40 data sheet, 2021", 149.7, 74.8, 37.4),
    PeakRates(("NVIDIA RTX A6000",), "Ampere GA102 whitepaper 2.0, appendix C, 2021", 154.8, 77.4, 38.7),
    PeakRates(("NVIDIA GeForce RTX 3090",), "Ampere GA102 whitepaper 2.0, appendix A, 2021", 71, 35.6, 35.6),
    # Ada Lovelace. The L40 has half the tensor rates of the L40S, although both have the same chip.
    PeakRates(("NVIDIA L4",), "L4 data sheet, 2023", 242 / 2, 120 / 2, 30.3, 485 / 2),
    PeakRates(("NVIDIA L40",), "L40 data sheet, 2023", 181.05, 90.5, 90.5, 362),
    PeakRates(("NVIDIA L40S",), "L40S data sheet, 2023", 362.05, 183, 91.6, 733),
    PeakRates(("NVIDIA RTX 6000 Ada Generation",), "Ada professional GPU whitepaper 1.1, 2023", 364.2, 182.1, 91.1, 728.5),
    PeakRates(("NVIDIA GeForce RTX 4090",), "Ada GPU architecture whitepaper 2.01, 2023", 165.2, 82.6, 82.6, 330.3),
    # Hopper.
    PeakRates(("NVIDIA H100 80GB HBM3",), "H100 data sheet, 2023: SXM", *_H100),
    PeakRates(("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM2e"), "H100 data sheet, 2023: PCIe", *_H100_PCIE),
    PeakRates(("NVIDIA H100 NVL",), "H100 data sheet, 2024: NVL", *_H100_NVL),
    PeakRates(("NVIDIA H200",), "H200 data sheet, 2024: SXM", *_H100),
    PeakRates(("NVIDIA H200 NVL",), "H200 data sheet, 2024: NVL", *_H100_NVL),
    PeakRates(("NVIDIA GH200 120GB", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"), "GH200 data sheet, 2023", *_H100),
    PeakRates(("NVIDIA H800",), "H800 data sheet, 2023: SXM", *_H100),
    PeakRates(("NVIDIA H800 PCIe",), "H800 data sheet, 2023: PCIe", *_H100_PCIE),
    PeakRates(("NVIDIA H20",), "H20 data sheet, 2023, which prints dense rates", 148, 74, 44, 296),
    # Blackwell.
    PeakRates(("NVIDIA B200",), "GB200 NVL72 and HGX B200 data sheet, 2025", 4500 / 2, 2200 / 2, 75, 9000 / 2),
    PeakRates(("NVIDIA GB200",), "GB200 NVL72 and HGX B200 data sheet, 2025", 5000 / 2, 2500 / 2, 80, 10000 / 2),
    PeakRates(("NVIDIA B300 SXM6 AC",), "HGX B300 data sheet, 2025: rates of 8 GPUs", 36000 / 16, 18000 / 16, 75, 4500),
    PeakRates(
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
        "RTX PRO Blackwell GPU architecture whitepaper, 2025",
        503.8,
        251.9,
        126,
        1007.6,
    ),
    # bf16 has an eighth of the rate in FP4 with sparsity, which these two data sheets print.
    PeakRates(
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
        "data sheet, 2025: 3,511 TOPS in FP4 with sparsity",
        3511 / 8,
        3511 / 16,
        110,
        3511 / 4,
    ),
    PeakRates(
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
        "data sheet, 2025: 4 PFLOPS in FP4 with sparsity",
        4000 / 8,
        4000 / 16,
        120,
        4000 / 4,
    ),
    PeakRates(("NVIDIA GeForce RTX 5090",), "RTX Blackwell GPU architecture whitepaper, 2025", 209.5, 104.8, 104.8, 419),
)


def rate_kind(precision: Precision, *, tf32: bool) -> RateKind:
    # For float8 this is the float8 rate, although attention and output projection are computed in bf16.
    return "tf32" if precision == "fp32" and tf32 else precision


def peak_flops(device_name: str, kind: RateKind) -> float | None:
    for rates in PEAK_RATES:
        if _board(device_name) in map(_board, rates.names):
            rate = rates.rate(kind)
            return None if rate is None else rate * 1e12
    return None


@dataclass(frozen=True)
class Flops:
    each: float  # operations per token, from `flops_per_token`
    peak: float | None  # peak rate of one device in operations per second, from `peak_flops`; None if unknown

    def mfu(self, tokens_per_s: float, num_gpus: int) -> float | None:
        """Return model FLOPs utilisation, 0 to 1. `tokens_per_s` counts those of all GPUs together, without padding."""
        return None if self.peak is None else tokens_per_s * self.each / (self.peak * num_gpus)


def unknown_mfu(device_name: str, kind: RateKind) -> str:
    return (
        f'MFU unknown for "{device_name}" in {kind}: trainer/machine/peak_rates.py has no peak rate for it; add one with its source'
    )


def _board(device_name: str) -> str:
    """Return the name without vendor. Drivers before 2021 omit "NVIDIA", and later drivers also put it before "Tesla"."""
    return device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")

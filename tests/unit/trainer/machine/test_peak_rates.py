import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import ModelConfig
from trainer.machine.peak_rates import PEAK_RATES, Flops, PeakRates, RateKind, peak_flops, rate_kind, unknown_mfu
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model, flops_per_token

# Names as drivers report them, then 10^12 operations per second in bf16 (fp16 if there is no bf16), typed a second time from the
# data sheets to detect a typing error in either place.
BOARDS = {
    "Tesla T4": ("fp16", 65),
    "NVIDIA A100-SXM4-40GB": ("bf16", 312),
    "NVIDIA A100-SXM4-80GB": ("bf16", 312),
    "NVIDIA A100-PCIE-40GB": ("bf16", 312),
    "NVIDIA A100 80GB PCIe": ("bf16", 312),
    "NVIDIA A800-SXM4-40GB": ("bf16", 312),
    "NVIDIA A800-SXM4-80GB": ("bf16", 312),
    "NVIDIA A800 80GB PCIe": ("bf16", 312),
    "NVIDIA A100-SXM-64GB": ("bf16", 358.2222),
    "NVIDIA A30": ("bf16", 165),
    "NVIDIA A10": ("bf16", 125),
    "NVIDIA A10G": ("bf16", 70),
    "NVIDIA A40": ("bf16", 149.7),
    "NVIDIA RTX A6000": ("bf16", 154.8),
    "NVIDIA GeForce RTX 3090": ("bf16", 71),
    "NVIDIA L4": ("bf16", 121),
    "NVIDIA L40": ("bf16", 181.05),
    "NVIDIA L40S": ("bf16", 362.05),
    "NVIDIA RTX 6000 Ada Generation": ("bf16", 364.2),
    "NVIDIA GeForce RTX 4090": ("bf16", 165.2),
    "NVIDIA H100 80GB HBM3": ("bf16", 989.5),
    "NVIDIA H100 PCIe": ("bf16", 756.5),
    "NVIDIA H100 80GB HBM2e": ("bf16", 756.5),
    "NVIDIA H800": ("bf16", 989.5),
    "NVIDIA H800 PCIe": ("bf16", 756.5),
    "NVIDIA H20": ("bf16", 148),
    "NVIDIA H100 NVL": ("bf16", 835.5),
    "NVIDIA H200": ("bf16", 989.5),
    "NVIDIA H200 NVL": ("bf16", 835.5),
    "NVIDIA GH200 120GB": ("bf16", 989.5),
    "NVIDIA GH200 480GB": ("bf16", 989.5),
    "NVIDIA GH200 144G HBM3e": ("bf16", 989.5),
    "NVIDIA B300 SXM6 AC": ("bf16", 2250),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": ("bf16", 503.8),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": ("bf16", 438.875),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("bf16", 500),
    "NVIDIA B200": ("bf16", 2250),
    "NVIDIA GB200": ("bf16", 2500),
    "NVIDIA GeForce RTX 5090": ("bf16", 209.5),
}
FP32 = {
    "Tesla T4": 8.1,
    "NVIDIA A100-SXM4-80GB": 19.5,
    "NVIDIA A800-SXM4-80GB": 19.5,
    "NVIDIA A100-SXM-64GB": 22.4,
    "NVIDIA A30": 10.3,
    "NVIDIA A10": 31.2,
    "NVIDIA A10G": 35,
    "NVIDIA A40": 37.4,
    "NVIDIA RTX A6000": 38.7,
    "NVIDIA GeForce RTX 3090": 35.6,
    "NVIDIA L4": 30.3,
    "NVIDIA L40": 90.5,
    "NVIDIA L40S": 91.6,
    "NVIDIA RTX 6000 Ada Generation": 91.1,
    "NVIDIA GeForce RTX 4090": 82.6,
    "NVIDIA H100 80GB HBM3": 67,
    "NVIDIA H100 PCIe": 51,
    "NVIDIA H100 NVL": 60,
    "NVIDIA H800": 67,
    "NVIDIA H800 PCIe": 51,
    "NVIDIA H20": 44,
    "NVIDIA H200": 67,
    "NVIDIA H200 NVL": 60,
    "NVIDIA GH200 480GB": 67,
    "NVIDIA B200": 75,
    "NVIDIA GB200": 80,
    "NVIDIA B300 SXM6 AC": 75,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 126,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 110,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 120,
    "NVIDIA GeForce RTX 5090": 104.8,
}
UNKNOWN = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A40-48Q",
    "NVIDIA A100X",
    "NVIDIA H100",
    "NVIDIA B300",
    "NVIDIA RTX PRO 6000 Blackwell",
    "Tesla V100-SXM2-16GB",
    "NVIDIA L40G",
    "NVIDIA RTX 6000",
    "Quadro RTX 6000",
    "AMD Instinct MI300X",
    "cpu",
    "",
]


def test_every_gpu_of_the_table_is_checked_here() -> None:
    assert sorted(name for rates in PEAK_RATES for name in rates.names) == sorted(BOARDS)
    with_fp32 = {name for rates in PEAK_RATES if rates.fp32 is not None for name in rates.names[:1]}
    assert {rates.fp32 for rates in PEAK_RATES} - {None} == set(FP32.values())
    assert len(with_fp32) == len(FP32)


@pytest.mark.parametrize("name", BOARDS)
def test_a_device_name_gives_the_rate_of_its_data_sheet(name: str) -> None:
    kind, tflops = BOARDS[name]
    half: RateKind = "bf16" if kind == "bf16" else "fp16"
    assert peak_flops(name, half) == pytest.approx(tflops * 1e12, rel=1e-6)
    assert peak_flops(name, "fp16") == peak_flops(name, half)


@pytest.mark.parametrize("name", FP32)
def test_a_device_name_gives_the_fp32_rate_of_its_data_sheet(name: str) -> None:
    assert peak_flops(name, "fp32") == pytest.approx(FP32[name] * 1e12, rel=1e-6)


@pytest.mark.parametrize("rates", PEAK_RATES, ids=lambda rates: rates.names[0])
def test_tensor_rates_double_from_tf32_to_bf16_to_float8_so_that_none_of_them_alone_is_with_sparsity(rates: PeakRates) -> None:
    if rates.has_bf16:
        assert rates.tf32 == pytest.approx(rates.half / 2, rel=0.03)
    if rates.float8 is not None:
        assert rates.float8 == pytest.approx(rates.half * 2, rel=0.03)
    assert rates.source


def test_sxm_and_pcie_boards_are_told_apart() -> None:
    boards = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA H100 PCIe")
    rates = [peak_flops(board, "bf16") or 0.0 for board in boards]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3


def test_a_name_is_the_same_with_and_without_its_vendor() -> None:
    for name in ("A100-SXM4-40GB", "GeForce RTX 3090", "H100 PCIe"):
        assert peak_flops(name, "bf16") == peak_flops(f"NVIDIA {name}", "bf16") is not None
    assert peak_flops("NVIDIA Tesla T4", "fp16") == peak_flops("Tesla T4", "fp16") == peak_flops("NVIDIA T4", "fp16") == 65e12


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_only_resembles_one_of_the_table_is_unknown(name: str) -> None:
    assert all(peak_flops(name, kind) is None for kind in ("fp32", "tf32", "bf16", "fp16", "float8"))


@pytest.mark.parametrize(("name", "kind"), [("Tesla T4", "bf16"), ("Tesla T4", "tf32"), ("NVIDIA A100-SXM4-80GB", "float8")])
def test_a_rate_that_the_gpu_does_not_have_is_unknown(name: str, kind: RateKind) -> None:
    assert peak_flops(name, kind) is None


@given(tokens_per_s=st.floats(1, 1e9), flops_each=st.floats(1, 1e15), peak=st.floats(1e9, 1e16), num_gpus=st.integers(1, 4096))
def test_mfu_of_n_gpus_is_that_of_one_with_the_nth_part_of_the_tokens(
    tokens_per_s: float, flops_each: float, peak: float, num_gpus: int
) -> None:
    share = Flops(flops_each, peak).mfu(tokens_per_s / num_gpus, 1)
    assert Flops(flops_each, peak).mfu(tokens_per_s, num_gpus) == pytest.approx(share)


def test_mfu_is_one_where_the_model_needs_all_that_the_gpus_can_do() -> None:
    assert Flops(2e9, 1e12).mfu(1000.0, 2) == 1.0


def test_an_unknown_peak_makes_an_unknown_mfu_which_names_the_device_and_the_file() -> None:
    assert Flops(2e9, None).mfu(1000.0, 2) is None
    text = unknown_mfu("NVIDIA GB300", "bf16")
    assert all(word in text for word in ("unknown", '"NVIDIA GB300"', "bf16", "trainer/machine/peak_rates.py"))


def test_the_rate_follows_the_precision_of_the_run() -> None:
    assert [rate_kind("fp32", tf32=tf32) for tf32 in (False, True)] == ["fp32", "tf32"]
    assert [rate_kind(precision, tf32=True) for precision in ("bf16", "fp16", "float8")] == ["bf16", "fp16", "float8"]


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(layers=2, width=32, heads=4, vocab_multiple=1),
        ModelConfig(layers=3, width=48, heads=4, kv_heads=2, head_dim=20, mlp_width=96, vocab_multiple=64, tie_embeddings=False),
    ],
    ids=["plain", "grouped queries, wide heads, padded vocabulary"],
)
def test_the_formula_equals_the_operations_that_torch_counts(config: ModelConfig) -> None:
    model = build_model(config, 50, seed=0).double()  # fp32 on a CPU uses oneDNN, whose products torch does not count
    positions_BL = torch.arange(24).expand(2, 24)
    tokens_BL = torch.zeros(2, 24, dtype=torch.int64)
    # With the plain kernel torch counts the two products of attention separately, over the whole square.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BL, make_layout(torch.zeros(2, 24, dtype=torch.int32), positions_BL)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(flops_per_token(config, 50, 24) * 2 * 24, rel=1e-12)


def test_a_layer_with_a_window_counts_the_tokens_of_its_window() -> None:
    config = ModelConfig(layers=3, width=32, heads=4, window=6, window_pattern="SLS")
    lengths = [flops_per_token(config.model_copy(update={"window": 0}), 50, length) for length in (6, 24)]
    assert flops_per_token(config, 50, 24) == (2 * lengths[0] + lengths[1]) / 3
    assert flops_per_token(config, 50, 5) == flops_per_token(config.model_copy(update={"window": 0}), 50, 5)

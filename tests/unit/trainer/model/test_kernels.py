"""B rows   L tokens of a row   N heads   H width of a head   C positions   V vocabulary"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.devices import CUDA
from trainer.config import LossConfig, ModelConfig
from trainer.model.layers import RMSNorm, normed_and_rotated, rotary_table, rotate
from trainer.model.loss import cross_entropy_sum
from trainer.model.operators import Bf16Embedding, has_kernels, loss_and_slopes_, norm_and_rotate

on_gpu = pytest.mark.parametrize("device", [CUDA])
choices = pytest.mark.parametrize(
    "choice",
    [LossConfig(), LossConfig(label_smoothing=0.1, z_loss=0.01, temperature=1.7), LossConfig(z_loss=0.1, temperature=0.5)],
    ids=["plain", "every-option", "sharp"],
)


def test_the_kernels_are_for_gpus_and_sixteen_bits() -> None:
    assert not has_kernels("cpu", torch.bfloat16)
    assert not has_kernels("cuda", torch.float32)


@on_gpu
@choices
@pytest.mark.parametrize("vocab_size", [5, 1000, 50_304])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_loss_and_its_slopes_are_those_of_the_formula(
    device: str, choice: LossConfig, vocab_size: int, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits_CV = (4 * torch.randn(7, vocab_size, device=device)).to(kind)
    chosen_C = torch.randint(0, vocab_size, (7,), device=device)
    exact_CV = logits_CV.double().requires_grad_()
    exact = torch.stack(
        [cross_entropy_sum(row[None, None], one[None, None], settings=choice) for row, one in zip(exact_CV, chosen_C, strict=True)]
    )
    (slopes_CV,) = torch.autograd.grad(exact.sum(), exact_CV)
    scale = 256.0
    losses_C = loss_and_slopes_(logits_CV, chosen_C, choice.label_smoothing, choice.z_loss, choice.temperature, scale)
    assert torch.allclose(losses_C, exact.detach().float(), rtol=1e-5, atol=1e-5)
    found_CV = logits_CV.double() / (choice.temperature * scale)
    assert torch.allclose(found_CV, slopes_CV, rtol=2 * torch.finfo(kind).eps, atol=1e-7)


@on_gpu
def test_the_loss_gives_the_same_bits_twenty_times(device: str) -> None:
    torch.manual_seed(0)
    logits_CV = torch.randn(512, 20_000, device=device, dtype=torch.bfloat16)
    chosen_C = torch.randint(0, 20_000, (512,), device=device)

    def outcome() -> list[Tensor]:
        overwritten_CV = logits_CV.clone()
        return [loss_and_slopes_(overwritten_CV, chosen_C, 0.1, 0.01, 1.5, 1.0), overwritten_CV]

    first = outcome()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, outcome(), strict=True))


def case(device: str, width: int, kind: torch.dtype = torch.bfloat16) -> tuple[Tensor, RMSNorm, tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(width)
    norm = RMSNorm(width, ModelConfig().norm_eps).to(device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    positions_BL = torch.arange(33, device=device).repeat(3, 1)
    x_BLNH, grad_BLNH = (torch.randn(3, 33, 5, width, device=device).to(kind) for _ in range(2))
    return x_BLNH, norm, rotary_table(positions_BL, width, 10_000.0), grad_BLNH


@on_gpu
@pytest.mark.parametrize("width", [8, 48, 64, 128])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_norm_and_rotation_have_the_values_and_gradients_of_the_plain_layers(device: str, width: int, kind: torch.dtype) -> None:
    x_BLNH, norm, table, grad_BLNH = case(device, width, kind)
    exact_BLNH = x_BLNH.float().requires_grad_()
    exact = rotate(norm(exact_BLNH), table)
    exact_by_x, exact_by_weight = torch.autograd.grad(exact, (exact_BLNH, norm.weight), grad_BLNH.float())
    x_BLNH.requires_grad_()
    found = normed_and_rotated(x_BLNH, norm, table)
    by_x, by_weight = torch.autograd.grad(found, (x_BLNH, norm.weight), grad_BLNH)
    rounding = 2 * torch.finfo(kind).eps
    assert (found.dtype, by_x.dtype, by_weight.dtype) == (kind, kind, torch.float32)
    assert torch.allclose(found.float(), exact, rtol=rounding, atol=rounding)
    assert torch.allclose(by_x.float(), exact_by_x, rtol=rounding, atol=rounding)
    assert torch.allclose(by_weight, exact_by_weight, rtol=1e-4, atol=1e-3)


@on_gpu
def test_the_gradients_of_norm_and_rotation_have_the_same_bits_twenty_times(device: str) -> None:
    x_BLNH, norm, table, grad_BLNH = case(device, 64)
    x_BLNH.requires_grad_()

    def outcome() -> tuple[Tensor, ...]:
        return torch.autograd.grad(normed_and_rotated(x_BLNH, norm, table), (x_BLNH, norm.weight), grad_BLNH)

    first = outcome()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, outcome(), strict=True))


@on_gpu
def test_torch_finds_no_fault_in_the_operators(device: str) -> None:
    x_BLNH, norm, (cos, sin), _ = case(device, 64)
    torch.library.opcheck(norm_and_rotate, (x_BLNH.requires_grad_(), norm.weight, cos, sin, norm.eps))
    logits_CV = torch.randn(4, 100, device=device, dtype=torch.bfloat16)
    torch.library.opcheck(loss_and_slopes_, (logits_CV, torch.zeros(4, dtype=torch.int64, device=device), 0.0, 0.0, 1.0, 1.0))


@on_gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_ids", "width"), [(1, 3, 8), (1000, 5, 24), (4096, 20_000, 768), (5000, 300, 1500), (640, 1, 8)]
)
def test_the_gradient_of_an_embedding_adds_the_tokens_of_each_id(device: str, num_tokens: int, num_ids: int, width: int) -> None:
    torch.manual_seed(0)
    ids_T = torch.randint(0, num_ids, (num_tokens,), device=device)
    weight_VD = torch.randn(num_ids + 3, width, device=device, requires_grad=True)
    grad_TD = torch.randn(num_tokens, width, device=device).bfloat16()
    found_TD = Bf16Embedding.apply(ids_T[None], weight_VD)
    assert torch.equal(found_TD[0], weight_VD[ids_T].bfloat16())
    (found,) = torch.autograd.grad(found_TD, weight_VD, grad_TD[None], retain_graph=True)
    expected = torch.zeros(weight_VD.shape, dtype=torch.float64, device=device).index_add_(0, ids_T, grad_TD.double())
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(found, torch.autograd.grad(found_TD, weight_VD, grad_TD[None], retain_graph=True)[0]) for _ in range(5))

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trainer.parallel.wrapping import reuse_traced_graphs


def compiled_gradient(factor: float) -> tuple[float, int]:
    """Return the gradient of a new autograd function whose backward pass has this factor, and how many graphs the cache had."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * factor

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return Scaled.apply(x).sum()  # type: ignore[no-untyped-call, no-any-return]

    torch._dynamo.reset()
    before = counters["aot_autograd"]["autograd_cache_hit"]
    x = torch.ones(4, requires_grad=True)
    torch.compile(call)(x).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad[0].item(), counters["aot_autograd"]["autograd_cache_hit"] - before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces and compiles
def test_a_graph_is_used_again_only_if_the_backward_pass_of_its_function_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    reuse_traced_graphs()
    assert [compiled_gradient(factor) for factor in (2.0, 3.0, 2.0)] == [(2.0, 0), (3.0, 0), (2.0, 1)]

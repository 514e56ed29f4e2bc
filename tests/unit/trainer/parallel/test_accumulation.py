from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from tests.support.ranks import run_ranks
from trainer.distributed.group import Group
from trainer.parallel import accumulation
from trainer.parallel.accumulation import Accumulation, DdpAccumulation, LateAccumulation, wrapped_by_ddp
from trainer.parallel.gradient_tree import GradientTree

LAYERS, WIDTH = 6, 16
PASSES = 2


def model_of_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def accumulated(model: nn.Sequential, group: Group, kind: str) -> tuple[nn.Module, Accumulation]:
    if kind == "tree":
        return model, GradientTree(list(model.parameters()), group)
    if group.world_size == 1:
        return model, Accumulation(list(model.parameters()))
    if kind == "late":
        return model, LateAccumulation(list(model.parameters()), group, WIDTH * WIDTH + 2 * WIDTH)  # several parts
    module = wrapped_by_ddp(model, bucket_cap_mb=0.002)
    accumulation = DdpAccumulation(module, list(model.parameters()))
    for _ in range(2):
        module(torch.zeros(1, WIDTH)).sum().backward()
    return module, accumulation


def inputs(rank: int, number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + number))


def step(
    group: Group, module: nn.Module, accumulation: Accumulation, broken_pass: int | None, layer: int, model: nn.Module
) -> bool:
    """Run a step of two passes and return whether it was complete. On rank 1 a backward pass may fail at a layer."""

    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    accumulation.begin()
    try:
        for number in range(PASSES):
            with accumulation.micro_batch(last=number == PASSES - 1):
                loss = module(inputs(group.rank, number)).square().sum()
                if group.rank == 1 and number == broken_pass:
                    next(model[layer].parameters()).register_hook(fail)  # type: ignore[index]
                loss.backward()
        accumulation.finish()
    except torch.OutOfMemoryError:
        accumulation.join(PASSES)
        return False
    return True


def broken_then_whole(group: Group, kind: str, broken_pass: int, layer: int) -> tuple[bool, bool, int, list[bytes]]:
    """Run a step that fails, then a complete one with a new model. The sum in between shows that all exchanges match."""
    model = model_of_layers()
    module, accumulation = accumulated(model, group, kind)
    complete = step(group, module, accumulation, broken_pass, layer, model)
    counted = int(group.sum(torch.ones(1)).item())
    del module, accumulation
    again = model_of_layers()
    module, accumulation = accumulated(again, group, kind)
    whole = step(group, module, accumulation, None, layer, again)
    return complete, whole, counted, [torch.as_tensor(weight.grad).numpy().tobytes() for weight in again.parameters()]


def whole_alone(group: Group, kind: str) -> list[Tensor]:
    """Return the gradients of the passes of both ranks, computed on one rank."""
    model = model_of_layers()
    loss = sum(model(inputs(rank, number)).square().sum() for rank in range(2) for number in range(PASSES))
    assert isinstance(loss, Tensor)
    loss.backward()
    return [torch.as_tensor(weight.grad) for weight in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "broken_pass", "layer"),
    [
        ("ddp", 0, 3),
        ("ddp", 1, LAYERS - 1),
        ("ddp", 1, 2),
        ("ddp", 1, 0),
        ("tree", 0, 3),
        ("tree", 1, 0),
        ("late", 0, 3),
        ("late", 1, 0),
    ],
)
def test_a_rank_whose_pass_breaks_off_does_its_part_of_the_exchanges(kind: str, broken_pass: int, layer: int) -> None:
    results = run_ranks(broken_then_whole, 2, kind, broken_pass, layer, timeout_s=60)
    assert [(complete, whole, counted) for complete, whole, counted, _ in results] == [(True, True, 2), (False, True, 2)]
    assert results[0][3] == results[1][3]
    for found, expected in zip(results[0][3], whole_alone(Group(0, 1, 0, torch.device("cpu")), kind), strict=True):
        torch.testing.assert_close(torch.frombuffer(bytearray(found), dtype=torch.float32).view_as(expected), expected)


def order_of_a_backward_pass(group: Group) -> list[str]:
    model = model_of_layers()
    module, accumulation = accumulated(model, group, "ddp")
    accumulation.begin()
    with accumulation.micro_batch(last=True):
        loss = module(inputs(group.rank, 0)).square().sum()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss.backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name in ("c10d::allreduce_", "AddmmBackward0")]


def test_ddp_begins_to_exchange_gradients_before_the_backward_pass_has_ended() -> None:
    for order in run_ranks(order_of_a_backward_pass, 2):
        exchanges = [place for place, name in enumerate(order) if name == "c10d::allreduce_"]
        assert order.count("AddmmBackward0") == LAYERS
        assert [order[:place].count("AddmmBackward0") for place in exchanges] == [2, 4, 6]


def gradients(group: Group, hooked: bool) -> list[bytes]:
    """Return the gradients of one pass with DDP: summed by the hook, or averaged by DDP from losses times the number of ranks."""
    model = model_of_layers()
    module = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    if hooked:
        DdpAccumulation(module, list(model.parameters()))
    for _ in range(2):
        module.zero_grad()
        (module(inputs(group.rank, 0)).square().sum() * (1 if hooked else group.world_size)).backward()
    return [torch.as_tensor(weight.grad).numpy().tobytes() for weight in model.parameters()]


def test_a_sum_over_two_ranks_has_the_bits_of_the_average_that_ddp_makes() -> None:
    both = partial(run_ranks, gradients, 2)
    assert both(True) == both(False)


def test_ddp_exchanges_no_buffers_in_each_release_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Before213:
        def __init__(self, module: nn.Module, broadcast_buffers: bool = True, gradient_as_bucket_view: bool = False) -> None:
            self.exchanges_buffers = broadcast_buffers

    monkeypatch.setattr(accumulation, "DistributedDataParallel", Before213)
    assert vars(wrapped_by_ddp(nn.Linear(1, 1))) == {"exchanges_buffers": False}

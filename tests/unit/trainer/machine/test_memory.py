import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.hardware import available_host_bytes, num_oom_kills, why_killed
from common.text import format_bytes
from tests.support.peaks import peak_of
from trainer.config import ModelConfig, TrainConfig
from trainer.context import RunContext
from trainer.distributed.group import Group
from trainer.extensions.hooks import Extension
from trainer.machine.memory import PeakMeter, available_bytes, is_out_of_memory, isolated_rng
from trainer.model.attention import make_layout
from trainer.model.decoder import Decoder, activation_bytes, build_model, num_weights
from trainer.model.dropout import row_keys
from trainer.model.lora import add_adapters
from trainer.model.loss import linear_cross_entropy_sum
from trainer.model.memory_estimate import MemoryEstimate, estimate
from trainer.parallel.gradient_tree import GradientTree
from trainer.training import micro_batch_size
from trainer.training.micro_batch_size import choose_micro, micro_candidates, probe, with_micro

VOCAB = 64
SHAPES = {
    "plain": ModelConfig(layers=4, width=128, heads=4, context=128),
    "grouped queries": ModelConfig(layers=3, width=128, heads=8, kv_heads=2, context=128),
    "long rows and wide heads": ModelConfig(layers=3, width=64, heads=2, head_dim=64, context=320),
    "wide SwiGLU": ModelConfig(layers=3, width=64, heads=2, mlp_width=640, context=128),
    "no norms of queries and keys": ModelConfig(layers=4, width=128, heads=8, kv_heads=4, context=128, qk_norm=False),
    "deep": ModelConfig(layers=8, width=64, heads=2, context=64),
    "Gemma": ModelConfig(layers=4, width=128, heads=4, context=128, post_norms=True, gate="gelu_tanh", attention_softcap=5.0),
    "windows": ModelConfig(layers=4, width=128, heads=4, context=128, window=32, window_pattern="SL"),
    "dropout": ModelConfig(layers=4, width=128, heads=4, context=128, residual_dropout=0.1, embedding_dropout=0.1),
    "dropout of the attention": ModelConfig(layers=4, width=128, heads=4, kv_heads=2, context=128, attention_dropout=0.1),
}
Checkpointing = Literal["none", "selective", "full"]


def settings_of(**changes: Any) -> TrainConfig:
    given = {
        "data": "data",
        "run": "run",
        "precision": "fp32",
        "limits": {"steps": 1},
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
    }
    return TrainConfig.model_validate(given | changes)


def estimate_of(config: TrainConfig, vocab_size: int, row_length: int, world_size: int, micro: int) -> MemoryEstimate:
    return estimate(config, vocab_size, row_length, world_size, micro, config.optim.optimizer.state_bytes, device_type="cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured_activations(config: ModelConfig, micro: int, *, mixed: bool) -> tuple[int, Decoder]:
    """Return the peak of a forward and backward pass up to the last normalised state. Gradients exist before it."""
    model = build_model(config, VOCAB, seed=0).train()
    segments_BL = torch.arange(config.context).expand(micro, config.context) // 40
    positions_BL = torch.arange(config.context).expand(micro, config.context) % 40

    def run() -> None:
        keys_B = row_keys(0, 0, 0, micro, torch.device("cpu")) if config.has_dropout else None
        layout = make_layout(segments_BL.int(), positions_BL.clone(), keys_B=keys_B, dropout=config.attention_dropout)
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            hidden_BLD = model.hidden(torch.zeros(micro, config.context, dtype=torch.int64), layout)
        torch.autograd.backward(hidden_BLD, torch.ones((), dtype=hidden_BLD.dtype).expand_as(hidden_BLD))

    run()
    return peak_of(run), model


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_of_activations_is_what_a_pass_takes_or_somewhat_more(
    shape: str, checkpointing: Checkpointing, *, mixed: bool
) -> None:
    config = SHAPES[shape].model_copy(update={"activation_checkpointing": checkpointing})
    measured, model = measured_activations(config, 4, mixed=mixed)
    casts = 2 * sum(weight.numel() for weight in model.model.layers.parameters()) if mixed else 0
    expected = activation_bytes(config, config.context, 4, mixed=mixed, backend="sdpa") + casts
    assert (0.85 if checkpointing == "none" else 0.6) * expected <= measured <= expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_estimate_of_a_step_with_adapters_is_what_it_takes_or_somewhat_more(precision: str, dropout: float) -> None:
    config = settings_of(
        precision=precision,
        model={"layers": 4, "width": 96, "heads": 3, "context": 128},
        loss={"chunk_tokens": 64},
        lora={"rank": 8, "dropout": dropout},
    )
    expected = estimate_of(config, 8192, config.model.context, 1, config.batch.micro_rows)
    adapters = 4 * 8 * (4 * 2 * 96 + 3 * (96 + 256))
    assert (expected.gradients, expected.optimizer) == (4 * adapters, 8 * adapters)
    share = peak_of(lambda: train_two_steps(config, 8192)) / expected.total
    assert 0.7 <= share <= 1.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("vocab_size", "tie"), [(64, True), (8192, True), (8192, False)], ids=["few pieces", "many pieces", "own output projection"]
)
def test_the_estimate_of_a_whole_step_is_what_it_takes_or_somewhat_more(vocab_size: int, precision: str, *, tie: bool) -> None:
    config = settings_of(
        precision=precision,
        model={"layers": 4, "width": 96, "heads": 3, "context": 128, "tie_embeddings": tie},
        loss={"chunk_tokens": 64},
    )
    expected = estimate_of(config, vocab_size, config.model.context, 1, config.batch.micro_rows).total
    share = peak_of(lambda: train_two_steps(config, vocab_size)) / expected
    assert 0.7 <= share <= 1.0


def train_two_steps(config: TrainConfig, vocab_size: int) -> None:
    """Build a model and train it on two steps of two micro-batches."""
    rows, length = config.batch.micro_rows, config.model.context
    targets_BL = torch.zeros(rows, length, dtype=torch.int64)
    keys_B = row_keys(0, 0, 0, rows, torch.device("cpu")) if config.has_dropout else None
    model = build_model(config.model, vocab_size, seed=0).train()
    add_adapters(model, config.lora, seed=0)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], fused=True)
    for _ in range(2):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
                layout = make_layout(targets_BL.int(), torch.arange(length).expand(rows, length), keys_B=keys_B)
                loss = linear_cross_entropy_sum(model.hidden(targets_BL, layout), model.lm_head.weight, targets_BL, config.loss)
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_every_backend_but_sdpa_goes_without_a_mask() -> None:
    masked, *unmasked = (
        activation_bytes(SHAPES["plain"], 128, 1, mixed=False, backend=backend) for backend in ("sdpa", "varlen", "flex")
    )
    assert unmasked[0] == unmasked[1] == masked - (4 * 4 + 1) * 128 * 128  # 4 layers in fp32, and the bools once


def test_checkpointing_keeps_less_the_more_is_computed_again() -> None:
    sizes = [
        activation_bytes(SHAPES["deep"].model_copy(update={"activation_checkpointing": mode}), 64, 4, mixed=False, backend="varlen")
        for mode in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_weights_gradients_and_adamw_take_what_torch_allocates(kv_heads: int, *, tie: bool) -> None:
    config = settings_of(model={"layers": 3, "width": 64, "heads": 4, "kv_heads": kv_heads, "tie_embeddings": tie})
    model = build_model(config.model, 50, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.hidden(torch.zeros(1, 8, dtype=torch.int64), make_layout(torch.zeros(1, 8, dtype=torch.int32), torch.arange(8)[None]))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    moments = [state for states in optimizer.state.values() for state in states.values() if state.ndim]
    expected = estimate_of(config, 50, 32, 1, 1)
    assert num_weights(config.model, 50) == sum(weight.numel() for weight in model.parameters())
    assert expected.weights == expected.gradients == sum(weight.nbytes for weight in model.parameters())
    assert expected.optimizer == sum(moment.nbytes for moment in moments)


def test_muon_keeps_one_average_for_the_matrices_of_the_layers() -> None:
    config = settings_of(model={"layers": 2, "width": 64, "heads": 2})
    adamw, muon = (estimate_of(settings_of(model=config.model, optim={"kind": kind}), 50, 32, 1, 1) for kind in ("adamw", "muon"))
    matrices = [weight for weight in build_model(config.model, 50, seed=0).model.layers.parameters() if weight.ndim == 2]
    assert adamw.optimizer - muon.optimizer == sum(weight.nbytes for weight in matrices)


def test_the_moving_average_is_as_large_as_the_weights() -> None:
    with_average = estimate_of(settings_of(ema={"decay": 0.99}), 50, 32, 1, 1)
    assert with_average.average == with_average.weights
    assert estimate_of(settings_of(), 50, 32, 1, 1).average == 0


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_tree_holds_the_sums_that_are_estimated(world_size: int) -> None:
    config = settings_of(reproducibility="elastic", batch={"global_batch_size": 16, "micro_batch_size": 2})
    found = estimate_of(config, VOCAB, 32, world_size, 2)
    model = build_model(config.model, VOCAB, seed=0)

    def run() -> None:
        tree = GradientTree(list(model.parameters()), Group(0, 1, 0, torch.device("cpu")))
        tree.begin()
        for _ in range(8 // world_size):
            tree.add()
        tree.finish()

    assert peak_of(run) == found.gradients + found.tree
    assert estimate_of(settings_of(), VOCAB, 32, world_size, 2).tree == 0


def test_fsdp_divides_weights_gradients_optimizer_and_average_by_the_ranks_and_gathers_some() -> None:
    config = settings_of(parallel="fsdp", ema={"decay": 0.99}, model={"layers": 16, "width": 128, "heads": 2})
    alone, four = estimate_of(config, 50, 32, 1, 1), estimate_of(config, 50, 32, 4, 1)
    for part in ("weights", "gradients", "optimizer", "average"):
        assert getattr(four, part) == pytest.approx(getattr(alone, part) / 4, abs=1)
    assert alone.gathered == 0
    assert four.activations == alone.activations
    once, twice = estimate_of(config, 50, 32, 4, 4), estimate_of(config, 50, 32, 4, 2)
    assert once.gathered < alone.weights < twice.gathered, "whole gradients are kept only between micro-batches"


def test_ddp_divides_nothing() -> None:
    assert estimate_of(settings_of(), 50, 32, 8, 1) == estimate_of(settings_of(), 50, 32, 1, 1)


def test_logits_are_those_of_a_chunk_however_large_the_micro_batch_is() -> None:
    one, many = (
        estimate_of(settings_of(loss={"chunk_tokens": 100}), 50_000, 128, 1, micro).loss - 2 * 4 * 384 * 128 * micro
        for micro in (1, 16)
    )
    assert one == many
    assert estimate_of(settings_of(loss={"chunk_tokens": 200}), 50_000, 128, 1, 4).loss > one


def test_the_description_adds_up_and_leaves_out_what_is_zero() -> None:
    found = MemoryEstimate(3, 1 << 30, 1 << 29, 0, 0, 0, 0, 0, 1 << 20, 512)
    assert found.total == (1 << 30) + (1 << 29) + (1 << 20) + 512
    assert found.describe() == (
        "memory estimate 1.5 GiB for micro-batches of 3 rows: weights 1.0 GiB, gradients 512.0 MiB, activations 1.0 MiB, loss 512 B"
    )
    assert format_bytes(5 << 40) == "5.0 TiB"


@given(global_batch_size=st.integers(1, 5000), world_size=st.integers(1, 64))
def test_candidates_divide_the_global_batch_and_spread_it_as_evenly_as_they_can(global_batch_size: int, world_size: int) -> None:
    if global_batch_size < world_size:
        with pytest.raises(ConfigError, match=f"without rows; use at least {world_size}"):
            micro_candidates(global_batch_size, world_size)
        return
    candidates = micro_candidates(global_batch_size, world_size)
    assert candidates == sorted(set(candidates), reverse=True)
    assert all(global_batch_size % micro == 0 and global_batch_size // micro >= world_size for micro in candidates)
    busiest = [-(-(global_batch_size // micro) // world_size) * micro for micro in candidates]
    fewest = -(-global_batch_size // world_size)  # micro-batches of one row
    assert min(busiest) == fewest
    assert max(busiest) <= max(fewest, 1.125 * global_batch_size / world_size)


@pytest.mark.parametrize(
    ("global_batch_size", "world_size", "expected"),
    [(32, 1, [32, 16, 8, 4, 2, 1]), (32, 4, [8, 4, 2, 1]), (512, 3, [64, 32, 16, 8, 4, 2, 1]), (12, 8, [1]), (7, 7, [1])],
)
def test_candidates_of_some_batches(global_batch_size: int, world_size: int, expected: list[int]) -> None:
    assert micro_candidates(global_batch_size, world_size) == expected


def fixed(bytes_per_row: int) -> Callable[[int], MemoryEstimate]:
    return lambda micro: MemoryEstimate(micro, 100, 0, 0, 0, 0, 0, 0, bytes_per_row * micro, 0)


@pytest.mark.parametrize(("free", "expected"), [(10_000, 16), (1_000, 8), (999, 4), (223, 1)])
def test_the_largest_micro_batch_that_fits_into_nine_tenths_is_chosen(free: int, expected: int) -> None:
    config = settings_of(batch={"global_batch_size": 16, "micro_batch_size": "auto"})
    assert choose_micro(config.batch.global_batch_size, fixed(100), free, 32, 1) == expected


def test_a_model_that_does_not_fit_is_refused_with_what_is_free_and_what_is_needed() -> None:
    config = settings_of(batch={"global_batch_size": 16, "micro_batch_size": "auto"})
    with pytest.raises(ConfigError, match=r"222 B are free .* 1 rows of 32 tokens .* estimate 200 B .* parallel = fsdp"):
        choose_micro(config.batch.global_batch_size, fixed(100), 222, 32, 1)


class Memory:
    """Return a pass that fails with `error` for micro-batches of more than `most` rows."""

    def __init__(self, most: int, error: Exception) -> None:
        self.most, self.error = most, error
        self.tried: list[int] = []

    def run(self, micro: int) -> None:
        self.tried.append(micro)
        torch.randn(3)
        if micro > self.most:
            raise self.error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_a_probe_goes_down_until_a_pass_fits(error: Exception) -> None:
    device = Memory(4, error)
    assert probe(device.run, [16, 8, 4, 2, 1]) == 4
    assert device.tried == [16, 8, 4]


def test_a_probe_that_never_fits_says_so() -> None:
    device = Memory(0, MemoryError())
    with pytest.raises(ConfigError, match="out of memory even with micro-batches of 1 rows"):
        probe(device.run, [2, 1])


def test_a_probe_lets_other_errors_through() -> None:
    device = Memory(1, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        probe(device.run, [2, 1])
    assert device.tried == [2]


def test_a_probe_lets_go_of_what_a_failed_pass_held_before_it_tries_again() -> None:
    alive: list[int] = []

    class Tensor:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def run(micro: int) -> None:
        assert not alive
        held = Tensor()
        assert held is not None
        if micro > 1:
            raise MemoryError

    assert probe(run, [4, 2, 1]) == 1


@pytest.mark.parametrize("most", [16, 4, 0])
def test_a_probe_leaves_the_random_numbers_of_the_run_as_they_were(most: int) -> None:
    torch.manual_seed(7)
    expected = torch.randn(4)
    torch.manual_seed(7)
    with contextlib.suppress(ConfigError):
        probe(Memory(most, MemoryError()).run, [16, 8, 4])
    assert torch.equal(torch.randn(4), expected)


def test_random_numbers_are_as_before_also_where_the_body_raises() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with contextlib.suppress(KeyError), isolated_rng():
        torch.manual_seed(8)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probe_of_a_real_model_leaves_weights_and_gradients_as_they_were() -> None:
    model = build_model(SHAPES["plain"], VOCAB, seed=0)
    before = [weight.detach().clone() for weight in model.parameters()]

    def run(micro: int) -> None:
        tokens_BL = torch.zeros(micro, 16, dtype=torch.int64)
        model(tokens_BL, make_layout(tokens_BL.int(), torch.arange(16).expand(micro, 16))).sum().backward()
        model.zero_grad(set_to_none=True)

    assert probe(run, [4, 2]) == 4
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_only_failed_allocations_count_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60)  # no machine has that many bytes
    assert is_out_of_memory(real.value)
    assert is_out_of_memory(torch.OutOfMemoryError("whatever its text is"))
    for status in ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"):
        assert is_out_of_memory(RuntimeError(f"CUDA error: {status} when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("batch.micro_batch_size ran out of memory"))


def test_an_error_of_nccl_is_never_recovered_from_even_if_it_found_no_memory() -> None:
    text = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error. Last error: Cuda failure 2 'out of memory'"
    assert not is_out_of_memory(dist.DistBackendError(text))
    assert not is_out_of_memory(dist.DistBackendError("out of memory"))
    assert not is_out_of_memory(RuntimeError(text))
    wrapped = RuntimeError("the backward pass failed")
    wrapped.__cause__ = dist.DistBackendError(text)
    assert not is_out_of_memory(wrapped)


def test_the_cache_of_the_trial_is_released_before_the_ranks_exchange_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class FirstExchangeError(Exception):
        """Raised instead of the exchange of the result."""

    class StubGroup(Group):
        def smallest(self, value: int) -> int:
            calls.append("exchange")
            if calls.count("exchange") == 2:
                raise FirstExchangeError
            return value

    class StubTrial:
        def __init__(self, *_: object) -> None:
            calls.append("trial")

        def __call__(self, rows: int) -> None:
            del rows

        def __del__(self) -> None:
            calls.append("trial is gone")

    monkeypatch.setattr(micro_batch_size, "_trial", StubTrial)
    monkeypatch.setattr(micro_batch_size, "release_memory", lambda: calls.append("release"))
    group = StubGroup(0, 1, 0, torch.device("cpu"))
    config = settings_of(
        batch={"global_batch_size": 4, "micro_batch_size": "auto"}, model={"layers": 1, "width": 32, "heads": 4, "context": 8}
    )
    manifest = SimpleNamespace(vocab_size=16, row_length=8)
    context = RunContext(config, cast("Any", manifest), group, "sdpa")
    with pytest.raises(FirstExchangeError):
        with_micro(context, Extension())
    assert calls == ["exchange", "trial", "trial is gone", "release", "exchange"]


def test_the_meter_sees_memory_that_was_given_back_before_it_was_read() -> None:
    meter = PeakMeter(torch.device("cpu"))
    torch.ones(64 << 20, dtype=torch.uint8).sum()
    assert meter.bytes() >= 60 << 20
    if os.access("/proc/self/clear_refs", os.W_OK):
        assert PeakMeter(torch.device("cpu")).bytes() < 60 << 20


def test_ranks_on_one_machine_share_its_memory() -> None:
    assert 0 < available_bytes(torch.device("cpu"), 1 << 20) < available_bytes(torch.device("cpu"), 1)


def machine(root: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Return a `/proc` of a system with 1,000,000 kB of free memory, and a tree of cgroups."""
    proc, cgroups = root / "proc", root / "cgroups"
    for path, text in {
        proc / "meminfo": "MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n",
        proc / "self/cgroup": cgroup,
        **{cgroups / name: text for name, text in files.items()},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return proc, cgroups


V1 = "9:name=systemd:/\n4:memory:/docker/abc\n3:cpuset:/docker/abc\n0::/\n"
V2 = "0::/docker/abc\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        pytest.param("", {}, 1_024_000_000, id="no cgroup"),
        pytest.param(
            V2,
            {
                "docker/abc/memory.max": "500000000\n",
                "docker/abc/memory.current": "300000000\n",
                "docker/abc/memory.stat": "anon 1\ninactive_file 50000000\n",
            },
            250_000_000,
            id="version 2, files that were read can be dropped",
        ),
        pytest.param(
            V2,
            {
                "docker/abc/memory.max": "max\n",
                "docker/abc/memory.current": "300000000\n",
                "docker/memory.max": "400000000\n",
                "docker/memory.current": "390000000\n",
                "docker/memory.stat": "inactive_file 0\n",
            },
            10_000_000,
            id="version 2, the limit is further up",
        ),
        pytest.param(
            V2,
            {"memory.max": "70\n", "memory.current": "40\n", "memory.stat": "inactive_file 0\n"},
            30,
            id="version 2, the container's own cgroup stands at the root",
        ),
        pytest.param(
            V1,
            {
                "memory/docker/abc/memory.limit_in_bytes": "500\n",
                "memory/docker/abc/memory.usage_in_bytes": "600\n",
                "memory/docker/abc/memory.stat": "inactive_file 999\ntotal_inactive_file 0\n",
            },
            0,
            id="version 1, more than the limit is used",
        ),
        pytest.param(
            V1,
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "5\n",
                "memory/memory.stat": "total_inactive_file 0\n",
            },
            1_024_000_000,
            id="version 1, no limit",
        ),
    ],
)
def test_the_memory_that_is_left_is_that_of_the_narrowest_limit(
    tmp_path: Path, cgroup: str, files: dict[str, str], left: int
) -> None:
    assert available_host_bytes(*machine(tmp_path, cgroup, files)) == left


def test_this_machine_has_memory_left() -> None:
    assert 1 << 20 < available_host_bytes() < 1 << 50


LIMITED = "the memory limit of 500.0 MB is used up; raise it (Compose: MEMORY_LIMIT"


@pytest.mark.parametrize(
    ("cgroup", "folder", "kills", "limit", "said"),
    [
        pytest.param(V2, "docker/abc/", "memory.events", ("memory.max", "500000000"), LIMITED, id="version 2"),
        pytest.param(V2, "", "memory.events", ("memory.max", "500000000"), LIMITED, id="version 2, in a container"),
        pytest.param(V2, "", "memory.events", ("memory.max", "max"), "the memory of this machine is used up", id="no limit"),
        pytest.param(V1, "memory/", "memory.oom_control", ("memory.limit_in_bytes", "500000000"), LIMITED, id="version 1"),
        pytest.param(
            V1,
            "memory/docker/abc/",
            "memory.oom_control",
            ("memory.limit_in_bytes", "9223372036854771712"),
            "the memory of this machine is used up",
            id="version 1, no limit",
        ),
    ],
)
def test_a_kill_for_lack_of_memory_is_named_with_the_limit(
    tmp_path: Path, cgroup: str, folder: str, kills: str, limit: tuple[str, str], said: str
) -> None:
    counted = machine(tmp_path, cgroup, {f"{folder}{kills}": "low 0\noom 1\noom_kill 3\n", f"{folder}{limit[0]}": limit[1]})
    assert num_oom_kills(*counted) == 3
    assert why_killed(3, *counted) == ""
    assert why_killed(2, *counted).startswith(said)


def test_without_a_counter_nothing_is_said_about_memory(tmp_path: Path) -> None:
    unknown = machine(tmp_path, V2, {})
    assert (num_oom_kills(*unknown), why_killed(0, *unknown)) == (0, "")

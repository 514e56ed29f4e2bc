"""Memory runs out during a training, on one of several ranks or on the only one. The run continues with smaller micro-batches and
the same rows, and has the bits of a run that used these micro-batches from that step on.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import ConfigError, ProjectError, exit_code_of
from tests.support.prepared import write_prepared
from tests.support.ranks import RankError, run_ranks
from tests.support.replays import replay_run
from tests.support.runs import losses, metrics, tiny_config
from trainer.config import TrainConfig
from trainer.distributed.group import Group
from trainer.loop import train
from trainer.model.forward import LossModule
from trainer.parallel import accumulation, wrapping
from trainer.parallel.gradient_tree import GradientTree
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import LedgerEvent, read_ledger
from trainer.training import step as steps
from trainer.training.saver import Saver
from trainer.training.start import open as openings
from trainer.training.step import StepResult, StepResults
from trainer.verification.audit import audit_run


@dataclass
class Failure:
    """Memory runs out once: in a step, in the pass over one micro-batch of the global batch, at a place in that pass."""

    step: int
    number: int
    place: str
    """`forward`, `backward` (in the middle, after some gradients have been exchanged), or `clip`."""
    message: str = "CUDA out of memory. Tried to allocate 1.00 GiB"
    under_way: bool = field(default=False, init=False)

    def fail(self) -> None:
        self.under_way = False
        raise torch.OutOfMemoryError(self.message) if self.message.startswith("CUDA") else RuntimeError(self.message)


@contextmanager
def failing(*failures: Failure) -> Iterator[None]:
    """Let memory run out on this rank. DDP gets several buckets, as with models of ordinary size."""
    with pytest.MonkeyPatch.context() as patch:
        seed, forward, clip = steps.seed_micro_batch, steps.forward_pass, steps.clip_gradient
        left = list(failures)

        def seeding(base: int, step: int, number: int, draw: int) -> None:
            seed(base, step, number, draw)
            for failure in [failure for failure in left if (failure.step, failure.number) == (step, number)]:
                left.remove(failure)
                current.append(failure)
                failure.under_way = True

        def passing(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            if current and current[-1].under_way:
                if current[-1].place == "forward":
                    current[-1].fail()
                if current[-1].place == "backward":
                    weight = next(weight for name, weight in module.named_parameters() if "layers.1.mlp" in name)
                    handle = weight.register_hook(lambda _: (handle.remove(), current[-1].fail()))
            return forward(module, *args, **kwargs)

        def clipping(*args: Any) -> Tensor:
            if current and current[-1].under_way and current[-1].place == "clip":
                current[-1].fail()
            return clip(*args)

        current: list[Failure] = []
        patch.setattr(steps, "seed_micro_batch", seeding)
        patch.setattr(steps, "forward_pass", passing)
        patch.setattr(steps, "clip_gradient", clipping)
        patch.setattr(accumulation, "DistributedDataParallel", partial(DistributedDataParallel, bucket_cap_mb=0.01))
        yield
        assert not left, f"step or micro-batch was not reached: {left}"


def of_micro(data: Path, run: Path, micro: int, steps_limit: int, global_batch_size: int = 16, **changes: Any) -> TrainConfig:
    changes = {
        "eval": {"micro_batch_size": 4},
        "checkpoint": {"keep_last": 9},
        "batch": {"global_batch_size": global_batch_size, "micro_batch_size": micro},
        "limits": {"steps": steps_limit},
    } | changes
    return tiny_config(data, run, **changes)


def in_parts(data: Path, run: Path, micros: dict[int, int], **changes: Any) -> str:
    """Train a run whose user reduces the micro-batch in between. `micros` maps the last step of each part to its rows."""
    digest = ""
    for last, micro in micros.items():
        allowed = {"allow_changes": ["batch.micro_batch_size"]}
        digest = train(of_micro(data, run, micro, last, resume=allowed, **changes))
    return digest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def changes_of(run: Path) -> list[tuple[int, int]]:
    return [(change["step"], change["micro"]) for change in json.loads((run / "record.json").read_text())["changes"]]


def events_of(run: Path) -> list[tuple[int, str]]:
    return [(entry.head.step, entry.event) for entry in read_ledger(run / LEDGER) if isinstance(entry, LedgerEvent)]


@pytest.mark.parametrize(("place", "precision"), [("forward", "fp32"), ("backward", "fp16"), ("clip", "fp32")])
def test_a_step_that_runs_out_of_memory_is_made_again_with_half_the_rows(
    data: Path, tmp_path: Path, place: str, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    message = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory" if place == "clip" else "CUDA oom"
    settings = {"precision": precision, "ema": {"decay": 0.9}}
    with failing(Failure(6, 2, place, message)), caplog.at_level(logging.WARNING):
        result = train(of_micro(data, tmp_path / "failed", 4, 9, **settings))
    assert result == in_parts(data, tmp_path / "parts", {5: 4, 9: 2}, **settings)
    assert losses(tmp_path / "failed") == losses(tmp_path / "parts")
    assert changes_of(tmp_path / "failed") == [(6, 2)]
    assert events_of(tmp_path / "failed") == [(0, "order"), (5, "micro")]
    assert "step 6 is repeated: 4 rows ran out of memory" in caplog.text
    [alert] = [event for event in metrics(tmp_path / "failed", "alert") if "micro-batches" in event["message"]]
    assert alert["step"] == 6
    audit_run(tmp_path / "failed")


def test_what_is_late_to_be_read_is_made_again_too(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, the next step starts before the results of a step are read."""
    late = partial(StepResults, lag=1)
    monkeypatch.setattr("trainer.loop.StepResults", lambda lag: late())
    with failing(Failure(6, 2, "backward")):
        result = train(of_micro(data, tmp_path / "failed", 4, 9))
    assert result == in_parts(data, tmp_path / "parts", {5: 4, 9: 2})
    assert losses(tmp_path / "failed") == losses(tmp_path / "parts")
    audit_run(tmp_path / "failed")


def test_a_run_that_goes_on_and_a_replay_have_smaller_rows_from_the_same_step_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is of step 5, and memory ran out in step 7. Step 6 is repeated with the old micro-batch."""
    run = tmp_path / "failed"
    follow = Saver.follow
    monkeypatch.setattr(Saver, "follow", dying_at(8))
    with failing(Failure(7, 0, "forward")), pytest.raises(KeyError):
        train(of_micro(data, run, 4, 9))
    monkeypatch.setattr(Saver, "follow", follow)
    assert changes_of(run) == [(7, 2)]
    result = train(of_micro(data, run, 4, 9))
    assert result == in_parts(data, tmp_path / "parts", {6: 4, 9: 2})
    assert losses(run) == losses(tmp_path / "parts")
    assert events_of(run) == [(0, "order"), (6, "micro")]
    audit_run(run)
    for start in (0, 5):
        assert replay_run(run, 4, start=start).difference == ""


@pytest.mark.parametrize("failing_buffer", [1, 2, 3])
def test_no_room_for_the_partial_sums_of_elastic_says_what_would_help(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_buffer: int
) -> None:
    take, taken = GradientTree._take, []

    def taking(tree: GradientTree) -> Any:
        if not tree._free:
            taken.append(1)
            if len(taken) == failing_buffer:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return take(tree)

    monkeypatch.setattr(GradientTree, "_take", taking)
    message = r"step 1: out of memory with batch\.micro_batch_size = 2, which cannot change under reproducibility = elastic"
    with pytest.raises(ConfigError, match=message):
        train(of_micro(data, tmp_path / "run", 2, 9, reproducibility="elastic"))


def dying_at(step: int) -> Any:
    original = Saver.follow

    def follow(saver: Saver, result: StepResult) -> None:
        original(saver, result)
        if result.step == step:
            raise KeyError("dead")

    return follow


def test_memory_that_runs_out_in_the_middle_of_an_update_leads_back_to_the_newest_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At that moment some weights have been updated and others have not."""
    updates: list[int] = []

    def update(optimizers: Any, skip: Tensor) -> None:
        updates.append(1)
        step_unless(optimizers, skip)
        if len(updates) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")

    step_unless = steps.step_unless
    monkeypatch.setattr(steps, "step_unless", update)
    with pytest.raises(steps.CannotContinueError, match=r"step 7, and this rank cannot continue .* from step 7 on"):
        train(of_micro(data, tmp_path / "failed", 4, 9))
    assert train(of_micro(data, tmp_path / "failed", 4, 9)) == in_parts(data, tmp_path / "parts", {6: 4, 9: 2})
    assert changes_of(tmp_path / "failed") == [(7, 2)]
    audit_run(tmp_path / "failed")


def test_memory_that_a_single_row_exceeds_is_an_error_with_its_remedies(data: Path, tmp_path: Path) -> None:
    with (
        failing(Failure(2, 0, "forward")),
        pytest.raises(ConfigError, match=r"step 2: out of memory with a single row .*checkpoint"),
    ):
        train(of_micro(data, tmp_path / "run", 1, 9))


def test_the_order_of_the_tree_is_never_changed_silently(data: Path, tmp_path: Path) -> None:
    message = r"batch\.micro_batch_size = 4, which cannot change under reproducibility = elastic"
    with failing(Failure(2, 0, "forward")), pytest.raises(ConfigError, match=message):
        train(of_micro(data, tmp_path / "run", 4, 9, reproducibility="elastic"))


def test_an_evaluation_that_runs_out_of_memory_has_the_same_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(of_micro(data, tmp_path / "plain", 4, 5))
    calls: list[int] = []
    plain = LossModule.forward

    def forward(module: LossModule, tokens: Tensor, *args: Any, by_row: bool = False, **more: Any) -> Tensor:
        if by_row:
            calls.append(len(tokens))
            if len(tokens) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(module, tokens, *args, by_row=by_row, **more)

    monkeypatch.setattr(LossModule, "forward", forward)
    with caplog.at_level(logging.WARNING):
        train(of_micro(data, tmp_path / "small", 4, 5))
    assert calls.count(4) == 1
    assert caplog.text.count("an evaluation ran out of memory with 4 rows") == 1
    hexes = [[event["val_loss_hex"] for event in metrics(tmp_path / run, "eval")] for run in ("plain", "small")]
    assert hexes[0] == hexes[1]


def on_each(group: Group, failures: dict[int, list[Failure]], *configs: TrainConfig) -> list[str]:
    """Train one run after another on each rank of a group. The failures of each rank happen in the first run."""
    openings.joined_group = lambda *_: nullcontext(group)
    results = []
    for number, config in enumerate(configs):
        with failing(*(failures.get(group.rank, []) if number == 0 else [])):
            try:
                results.append(train(config))
            except ProjectError as error:
                results.append(f"{type(error).__name__} {int(exit_code_of(error))}: {error}")
    return results


def test_all_ranks_go_on_when_one_runs_out_of_memory(data: Path, tmp_path: Path) -> None:
    """Rank 1 fails in its only forward pass, rank 0 in its last backward pass, then both at different places of one step."""
    failures = {
        0: [Failure(5, 1, "backward"), Failure(7, 0, "clip")],
        1: [Failure(3, 1, "forward"), Failure(7, 5, "backward")],
    }
    parts = [
        of_micro(data, tmp_path / "parts", micro, last, global_batch_size=32, resume={"allow_changes": ["batch.micro_batch_size"]})
        for last, micro in ((2, 16), (4, 8), (6, 4), (8, 2))
    ]
    failed = of_micro(data, tmp_path / "failed", 16, 8, global_batch_size=32)
    results = run_ranks(on_each, 2, failures, failed, *parts, timeout_s=400)
    assert changes_of(tmp_path / "failed") == [(3, 8), (5, 4), (7, 2)]
    assert {found[0] for found in results} == {found[-1] for found in results}
    assert losses(tmp_path / "failed") == losses(tmp_path / "parts")
    audit_run(tmp_path / "failed")


def settling_on_each(group: Group, failing_pass: int, place: str, config: TrainConfig) -> tuple[str, int]:
    """Train on each rank. Rank 1 runs out of memory in one of the passes that make DDP choose its buckets."""
    forward, passes = wrapping.forward_pass, []

    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def passing(module: nn.Module, *args: Any) -> Tensor:
        passes.append(1)
        fails = group.rank == 1 and len(passes) == failing_pass
        if fails and place == "forward":
            fail(torch.empty(0))
        loss = forward(module, *args)
        if fails:
            weight = next(weight for name, weight in module.named_parameters() if "layers.1.mlp" in name)
            handle = weight.register_hook(lambda gradient: (handle.remove(), fail(gradient)))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping, "forward_pass", passing)
        [result] = on_each(group, {}, config)
    return result, len(passes)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("failing_pass", [1, 2, 3])
def test_no_rank_waits_if_memory_runs_out_while_ddp_chooses_its_buckets(
    data: Path, tmp_path: Path, failing_pass: int, place: str
) -> None:
    failed = of_micro(data, tmp_path / "failed", 8, 3)
    results = run_ranks(settling_on_each, 2, failing_pass, place, failed, timeout_s=200)
    assert {passes for _, passes in results} == {failing_pass + 3}
    assert changes_of(tmp_path / "failed") == [(1, 4)]
    whole = of_micro(data, tmp_path / "whole", 4, 3)
    expected = run_ranks(on_each, 2, {}, whole, timeout_s=200)
    assert {result for result, _ in results} == {found[0] for found in expected}
    assert losses(tmp_path / "failed") == losses(tmp_path / "whole")


def late_on_each(group: Group, failures: dict[int, list[Failure]], *configs: TrainConfig) -> list[str]:
    """As `on_each`, on a device whose results arrive one step late."""
    late = partial(StepResults, lag=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.loop.StepResults", lambda lag: late())
        return on_each(group, failures, *configs)


@pytest.mark.parametrize("place", ["backward", "forward", "clip"])
def test_all_ranks_go_on_when_the_step_after_a_failure_is_under_way(data: Path, tmp_path: Path, place: str) -> None:
    parts = [
        of_micro(data, tmp_path / "parts", micro, last, global_batch_size=32, resume={"allow_changes": ["batch.micro_batch_size"]})
        for last, micro in ((5, 16), (8, 8))
    ]
    failed = of_micro(data, tmp_path / "failed", 16, 8, global_batch_size=32)
    failure = Failure(6, 1, place)
    results = run_ranks(late_on_each, 2, {1: [failure]}, failed, *parts, timeout_s=200)
    assert changes_of(tmp_path / "failed") == [(6, 8)]
    assert {found[0] for found in results} == {found[-1] for found in results}
    assert losses(tmp_path / "failed") == losses(tmp_path / "parts")


def test_no_rank_waits_for_one_that_has_no_smaller_rows(data: Path, tmp_path: Path) -> None:
    tree = of_micro(data, tmp_path / "tree", 4, 9, reproducibility="elastic")
    results = run_ranks(on_each, 2, {1: [Failure(2, 3, "backward")]}, tree, timeout_s=200)
    assert all(found[0].startswith("ConfigError 2: step 2: out of memory") for found in results)


def test_a_rank_that_cannot_tell_the_others_notes_it_for_the_next_start(data: Path, tmp_path: Path) -> None:
    """Under FSDP the other ranks wait in the middle of a pass. The group must end. The next start uses the note that was left."""
    run = tmp_path / "failed"
    config = of_micro(data, run, 4, 7, parallel="fsdp")
    with pytest.raises(RankError):
        run_ranks(on_each_alone, 2, {1: [Failure(6, 2, "forward")]}, config, timeout_s=200)
    assert (run / "change-1.json").exists()
    allowed = {"allow_changes": ["batch.micro_batch_size"]}
    parts = [of_micro(data, tmp_path / "parts", micro, last, resume=allowed, parallel="fsdp") for last, micro in ((5, 4), (7, 2))]
    results = run_ranks(on_each, 2, {}, config, *parts, timeout_s=400)
    assert results[0][0] == results[0][-1]
    assert changes_of(run) == [(6, 2)]
    assert not list(run.glob("change-*"))
    audit_run(run)


def on_each_alone(group: Group, failures: dict[int, list[Failure]], config: TrainConfig) -> None:
    """As `on_each`, but an error ends the rank, as in a run."""
    [result] = on_each(group, failures, config)
    raise RuntimeError(result)

"""Measures a few steps of a training on one rank, without any file of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from common.errors import ConfigError
from common.hardware import num_cores
from trainer.config import BatchConfig, TrainConfig
from trainer.distributed.devices import num_gpus
from trainer.distributed.group import joined_group
from trainer.extensions.trust import load_extension
from trainer.launch.environment import expected_ranks
from trainer.machine.determinism import configure_determinism
from trainer.machine.memory import available_bytes, is_out_of_memory
from trainer.model.decoder import num_weights
from trainer.model.lora import num_adapter_weights
from trainer.parallel.fsdp import check_parallel
from trainer.planning.forecast import Forecast
from trainer.runs.adjustments import Adjustments
from trainer.runs.clock import UNTIMED_STEPS
from trainer.runs.state import Progress
from trainer.training.micro_batch_size import batch_for, expected_memory, spread
from trainer.training.start.build import build
from trainer.training.start.plan import StartPlan, check_shares, plan_start, with_micro_batch
from trainer.training.step import CannotContinueError, StepInputs, train_step
from trainer.training.trainable import RunData, Trainable, hold_copy

_TIMED_STEPS = 5
_MOST_MICRO_BATCHES = 4  # a measured step has at most this many micro-batches. The time of a step with more is in proportion.
_LONGEST_S = 60.0  # after this time one measured step is enough


@dataclass(frozen=True)
class DryRun:
    forecast: Forecast
    device: str
    num_ranks: int  # ranks on all nodes, as the launcher would start them
    free_bytes: int  # free memory for one rank
    step_s: float | None  # expected seconds of a step; None if the memory is too small for one


def dry_run(config: TrainConfig, now: Callable[[], float] = time.monotonic) -> DryRun:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("plan works in one process and was started on several ranks; start it without torchrun")
    here, nodes = expected_ranks(os.environ, num_gpus(config.device))
    num_ranks = here * nodes
    elastic = config.reproducibility == "elastic"
    if config.threads is None and here > 1 and not elastic and not os.environ.get("OMP_NUM_THREADS"):
        config = config.model_copy(update={"threads": max(1, num_cores() // here)})  # as the launcher sets it for each rank
    configure_determinism(config)
    with ExitStack() as stack:
        group = stack.enter_context(joined_group(config.device))
        extension = load_extension(config.extension)
        plan = with_micro_batch(plan_start(stack, config, group, extension, lock=False))
        batch = plan.context.config.batch
        if num_ranks > 1 and config.batch.micro_batch_size == "auto":  # it was chosen for one rank
            batch = spread(batch, num_ranks)
        context = plan.context.with_batch(batch_for(batch, None, num_ranks, elastic=elastic))
        config, manifest = context.config, context.manifest
        check_shares(config, num_ranks)
        check_parallel(config.parallel, config.batch, num_ranks)
        free_bytes = available_bytes(group.device, here)
        weights, step_s = _measured(replace(plan, context=context), num_ranks, now)
        of_ranks = replace(context, group=replace(group, world_size=num_ranks))
        memory = expected_memory(of_ranks, config.batch.micro_rows, plan.task)
        saved = plan.earlier[0].own
        steps = saved.steps
        done = saved.state(steps[-1]).progress if steps else Progress()
        num_rows = len(plan.data.train_rows), len(plan.data.val_rows)
        facts = Forecast(config, manifest, plan.criteria.expected_steps, weights, *num_rows, done, memory)
        return DryRun(facts, group.device.type, num_ranks, free_bytes, step_s)


def _measured(plan: StartPlan, num_ranks: int, now: Callable[[], float]) -> tuple[int, float | None]:
    context, config = plan.context, plan.context.config
    micro_batches = -(-config.batch.micro_batches // num_ranks)
    probed = 1 << (min(micro_batches, _MOST_MICRO_BATCHES).bit_length() - 1)  # a power of two, as `elastic` needs
    micro = config.batch.micro_rows
    context = context.with_batch(BatchConfig(global_batch_size=probed * micro, micro_batch_size=micro))
    weights = num_weights(config.model, context.manifest.vocab_size) + num_adapter_weights(config.model, config.lora)
    try:
        trainable, adjustments = build(replace(plan, context=context), Adjustments(), 1)
        hold_copy(context, plan.task)
        weights = trainable.num_weights
        step_s = None if adjustments.made else measured_step_s(trainable, replace(plan.data, context=context), now)
    except Exception as error:
        if not isinstance(error, CannotContinueError) and not is_out_of_memory(error):
            raise
        step_s = None
    return weights, None if step_s is None else step_s * micro_batches / probed


def measured_step_s(trainable: Trainable, data: RunData, now: Callable[[], float]) -> float | None:
    """Return the median seconds of five steps after those that compile code; None if a step runs out of memory."""
    untimed = UNTIMED_STEPS if trainable.context.config.compiles(trainable.context.group.device.type) else 1
    begin, seconds = now(), list[float]()
    with data.batches(Progress(), Adjustments()) as batches:
        for step in range(1, untimed + _TIMED_STEPS + 1):
            start, batch = now(), next(batches)
            if batch.fault is not None:
                raise batch.fault.error
            if train_step(trainable, batch, StepInputs(step)).result().void:
                return None
            seconds.append(now() - start)
            if step > untimed and now() - begin > _LONGEST_S:
                break
    return median(seconds[untimed:])

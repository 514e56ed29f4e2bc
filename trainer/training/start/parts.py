"""Puts the parts of a run together: its files and the objects that the loop calls."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from trainer.checkpoint.async_saver import AsyncSaver, Staging
from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.stragglers import DeviceMark, HostMark, OwnTimer, StragglerDetector
from trainer.evaluation.tally import Grouping
from trainer.health.guard import Guard
from trainer.machine.determinism import device_name
from trainer.machine.peak_rates import Flops, peak_flops, rate_kind
from trainer.machine.profiler import StepProfiler
from trainer.metrics.layers import LayerObserver
from trainer.metrics.monitor import opened_monitor
from trainer.metrics.run_status import opened_run_status
from trainer.model.decoder import flops_per_token
from trainer.planning.forecast import Forecast
from trainer.runs.clock import Clock
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import Ledger
from trainer.training.adjuster import Adjuster
from trainer.training.micro_batch_size import expected_memory
from trainer.training.run_end import RunEnd, StopRequests
from trainer.training.saver import LiveState, Saver, let_finish, write_and_keep
from trainer.training.start.build import Restored
from trainer.training.start.check import Continued
from trainer.training.start.plan import StartPlan
from trainer.training.training_run import TrainingRun
from trainer.watchdog.heartbeat import HeartbeatWriter


def put_together(
    stack: ExitStack,
    plan: StartPlan,
    continued: Continued,
    restored: Restored,
    stop: StopRequests,
    heartbeat: HeartbeatWriter,
    clock: Clock,
) -> TrainingRun:
    """Open the files of the run, behind its record, and make the parts. The files close in the reverse order."""
    context, data, task = plan.context, plan.data, plan.task
    config, group, manifest = context.config, context.group, context.manifest
    trainable, adjustments, state, progress = restored.trainable, restored.adjustments, restored.state, restored.progress
    ledger: Ledger | None = None

    def open_ledger() -> None:
        nonlocal ledger
        # cut to the lines that the checkpoint knows
        ledger = stack.enter_context(closing(Ledger(config.run / LEDGER, None if state is None else state.ledger)))
        rows, mixture = len(data.train_rows), config.mixture.weights
        ledger.order(step=progress.step, seed=config.seed, data=manifest.root_digest, rows=rows, mixture=mixture)

    def write_report() -> None:
        from trainer.report.write import report_at_end

        report_at_end(config.run)

    if group.is_main and config.log.report:
        stack.callback(write_report)  # after everything else is closed, for any end of the run
    ending = stack.enter_context(opened_run_status(config, group, progress.step))
    writer = AsyncSaver(partial(write_and_keep, continued.checkpoints, config.checkpoint))
    stack.callback(let_finish, writer, heartbeat)  # before the record names the checkpoints, and before the run's lock is released
    group.on_main(open_ledger)
    known = None if state is None else state.known
    monitor = stack.enter_context(opened_monitor(config, group, last_step=plan.criteria.certain_step, cut_off=known))
    stack.push(lambda _kind, error, _traceback: None if error is None else ending.tell(error, monitor))  # the monitor is open yet
    stack.callback(heartbeat.at, "save")  # runs first, because closing the sinks and writing the report may take long
    clock.resume(progress.seconds, progress.ending_s)  # after a slow start of a sink, which is no part of the first step
    live = LiveState(group, Guard(config.guard, scaled=config.number_format == "fp16"), ledger, monitor, ending)
    if state is not None:
        live.resume(state)

    compared_steps = 0 if config.parallel == "fsdp" else config.watchdog.replicas_steps
    replica_check = ReplicaCheck(trainable.parameters, group, compared_steps, progress.step)
    adjuster = Adjuster(context, adjustments, monitor, ledger)
    batch_tokens = config.batch.global_batch_size * manifest.row_length
    end = RunEnd(plan.criteria, config.schedule, batch_tokens, adjuster, adjustments.cooldown(progress.step))
    memory = expected_memory(context, adjustments.batch(config.batch, progress.step + 1).micro_rows, task)
    num_rows = len(data.train_rows), len(data.val_rows)
    expected = Forecast(config, manifest, plan.criteria.expected_steps, trainable.num_weights, *num_rows, progress, memory)
    flops = (
        flops_per_token(config.model, manifest.vocab_size, manifest.row_length, config.lora)
        if task.flops is None
        else task.flops(config.model, manifest)
    )
    profiler = StepProfiler(config.run, config.log.profile_steps, group.rank, group.device)
    stack.callback(profiler.close)
    saved = None if state is None else (progress.step, progress.evaluated_step)
    staging = Staging(trainable.tensors() if group.is_main else {})
    saver = Saver(trainable, live, end, replica_check, continued.checkpoints, config.checkpoint, writer, staging, saved)
    return TrainingRun(
        context=context,
        data=data,
        trainable=trainable,
        end=end,
        state=live,
        resumed=progress,
        clock=clock,
        heartbeat=heartbeat,
        stop=replace(stop, monitor=monitor),
        own_timer=OwnTimer(DeviceMark if group.device.type == "cuda" else HostMark),
        replica_check=replica_check,
        adjuster=adjuster,
        saver=saver,
        observer=LayerObserver(trainable.model, group, config.log.layers_every_steps, config.log.histograms_every_steps),
        stragglers=StragglerDetector(),
        flops=Flops(flops, peak_flops(device_name(group.device), rate_kind(config.number_format, tf32=config.tf32))),
        forecast=expected,
        grouping=Grouping.of(config.data, manifest, data.tokenizer if task.predicts_tokens else None),
        memory=plan.memory,
        profiler=profiler,
    )

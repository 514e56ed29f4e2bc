"""Puts the parts of a run together."""

from __future__ import annotations

from contextlib import ExitStack

from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.stragglers import DeviceMark, HostMark, OwnTimer, StragglerDetector
from trainer.evaluation.tally import Grouping
from trainer.health.guard import Guard
from trainer.machine.determinism import device_name
from trainer.machine.peak_rates import Flops, peak_flops, rate_kind
from trainer.machine.profiler import StepProfiler
from trainer.metrics.layers import LayerObserver
from trainer.model.decoder import flops_per_token
from trainer.model.parameters import parameters_by_name
from trainer.planning.forecast import forecast
from trainer.runs.clock import Clock
from trainer.training.adjuster import Adjuster
from trainer.training.evaluator import Evaluator
from trainer.training.micro_batch_size import expected_memory
from trainer.training.recovery import Recovery
from trainer.training.reporter import Reporter, TrainLoss
from trainer.training.run_end import RunEnd
from trainer.training.run_state import LiveState
from trainer.training.saver import Saver
from trainer.training.start.build import Restored
from trainer.training.start.check import Continued
from trainer.training.start.files import RunFiles
from trainer.training.start.plan import StartPlan
from trainer.training.stop import StopRequests
from trainer.training.training_run import TrainingRun
from trainer.watchdog.heartbeat import HeartbeatWriter


def put_together(
    stack: ExitStack,
    plan: StartPlan,
    continued: Continued,
    restored: Restored,
    files: RunFiles,
    stop: StopRequests,
    heartbeat: HeartbeatWriter,
    clock: Clock,
) -> TrainingRun:
    context, data, task = plan.context, plan.data, plan.task
    config, group, manifest = context.config, context.group, context.manifest
    trainable, adjustments, state, progress = restored.trainable, restored.adjustments, restored.state, restored.progress
    clock.resume(progress.seconds, progress.ending_s)

    compared_steps = 0 if config.parallel == "fsdp" else config.watchdog.replicas_steps
    replica_check = ReplicaCheck(parameters_by_name(trainable.model), group, compared_steps, progress.step)
    observer = LayerObserver(trainable.model, group, config.log.layers_every_steps, config.log.histograms_every_steps)
    guard = Guard(config.guard, scaled=config.number_format == "fp16")
    live = LiveState(group, guard, files.ledger, files.monitor, files.ending)
    if state is not None:
        live.resume(state)
    adjuster = Adjuster(context, adjustments, files.monitor, files.ledger)
    batch_tokens = config.batch.global_batch_size * manifest.row_length
    end = RunEnd(plan.criteria, config.schedule, batch_tokens, adjuster, adjustments.cooldown(progress.step))
    memory = expected_memory(context, adjustments.batch(config.batch, progress.step + 1).micro_rows, task)
    num_rows = len(data.train_rows), len(data.val_rows)
    weights, limits = trainable.num_weights, plan.criteria
    expected = forecast(config, manifest, limits, num_weights=weights, num_rows=num_rows, done=progress, memory=memory)
    flops = (
        flops_per_token(config.model, manifest.vocab_size, manifest.row_length, config.lora)
        if task.flops is None
        else task.flops(config.model, manifest)
    )
    reporter = Reporter(
        state=live,
        end=end,
        clock=clock,
        monitor=files.monitor,
        observer=observer,
        adjuster=adjuster,
        flops=Flops(flops, peak_flops(device_name(group.device), rate_kind(config.number_format, tf32=config.tf32))),
        stragglers=StragglerDetector(),
        loss=TrainLoss(
            custom=plan.extension.custom_loss is not None or plan.extension.has_step,
            vocab_size=manifest.vocab_size,
            measures=task.step_metrics,
            has_perplexity=task.has_perplexity,
        ),
        guard_settings=config.guard,
        forecast=expected if group.is_main else None,
    )
    profiler = StepProfiler(config.run, config.log.profile_steps, group.rank, group.device)
    stack.callback(profiler.close)
    saved = None if state is None else (progress.step, progress.evaluated_step)
    saver = Saver(trainable, live, end, replica_check, continued.checkpoints, config.checkpoint, files.writer, saved)
    grouping = Grouping.of(config.data, manifest, data.tokenizer if task.predicts_tokens else None)
    return TrainingRun(
        context=context,
        data=data,
        trainable=trainable,
        end=end,
        state=live,
        resumed=progress,
        clock=clock,
        heartbeat=heartbeat,
        stop=stop,
        own_timer=OwnTimer(DeviceMark if group.device.type == "cuda" else HostMark),
        replica_check=replica_check,
        adjuster=adjuster,
        reporter=reporter,
        saver=saver,
        evaluator=Evaluator(data, trainable, live, end, stop, adjuster, grouping, heartbeat.beat),
        recovery=Recovery(trainable, saver, live, adjuster, observer, replica_check, heartbeat),
        expected_memory=memory,
        memory=plan.memory,
        profiler=profiler,
    )

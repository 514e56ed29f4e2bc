"""The lines that a start of a training logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from common.settings.load import AUTO
from trainer.config import settings_without_effect
from trainer.context import RunContext
from trainer.machine.environment import ChangedFact, unlocked_here
from trainer.machine.peak_rates import rate_kind, unknown_mfu
from trainer.metrics.sinks.tensorboard_graph import model_graph
from trainer.model.attention import BACKENDS
from trainer.model.decoder import Decoder
from trainer.planning.lines import brief_lines, other_preparation
from trainer.training.start.check import Continued
from trainer.training.start.earlier import is_new_branch
from trainer.training.trainable import Trainable
from trainer.training.training_run import TrainingRun
from trainer.watchdog.watch import is_watched

_log = logging.getLogger(__name__)


def introduce(run: TrainingRun, start: Continued, differences: Sequence[ChangedFact]) -> None:
    """Log the size of model, data and group and the settings without effect, and give the graph of a new model to the sinks.

    `differences` are those of a resumed run from the start before.
    """
    context, manifest, continued = run.context, run.context.manifest, start.newest is not None
    config, group = context.config, context.group
    trained, total = run.trainable.num_trained, run.trainable.num_weights
    some = "" if trained == total else f", of which {trained / 1e6:.3g}M ({trained / total:.2%}) are trained"
    _log.info(
        f"{f'resuming {config.run} at step {run.resumed.step}' if continued else f'training in {config.run}'}  "
        f"{total / 1e6:.2f}M weights{some}, vocabulary {manifest.vocab_size}, {len(run.data.train_rows)} training and "
        f"{len(run.data.val_rows)} validation rows of {manifest.row_length} tokens, "
        f"{group.world_size} rank{'s' * (group.world_size > 1)} on {group.device.type}, {config.number_format}"
    )
    if start.before is not None and is_new_branch(start.before.record):
        _log.info("branched off %s at step %d", config.branch.run, run.resumed.step)
    if start.initial is not None and not continued:
        _log.info("the weights are those of step %d of %s", start.initial.step, config.init)
    if differences and group.is_main:  # every rank has them, and other ranks log warnings
        lines = "".join(f"\n  {one.describe()}" for one in differences)
        level, step = logging.WARNING if any(one.changes_bits for one in differences) else logging.INFO, run.resumed.step
        _log.log(level, "resumed at step %s with differences from the previous start (* can change the results):%s", step, lines)
    if not continued and (other := other_preparation(config.recipe, manifest)):
        _log.info("%s", other)
    if not continued and config.recipe == AUTO:
        model, limits = config.model, config.limits
        bounds = {name: getattr(limits, name) for name in ("minutes", "epochs", "steps", "tokens")}
        ends = " or ".join(f"limits.{name} = {value:g}" for name, value in bounds.items() if value is not None)
        _log.info(
            f"recipe auto: {model.layers} layers of width {model.width}, {config.batch.global_batch_size} rows in a step, "
            f"{config.optim.kind}, until {ends}; settings that you give are kept (docs/guide/model-size.md)"
        )
    _log.info("%s; attention %s", run.data.order.description, BACKENDS[context.backend])
    if group.is_main:
        if unlocked := unlocked_here():
            _log.warning("%s; results may differ from those of an installation from the lock", unlocked)
        warn_of_settings(context, run.trainable)
        for line in brief_lines(run.forecast):
            _log.info("%s", line)
    if run.flops.peak is None and group.device.type == "cuda":
        gpu = torch.cuda.get_device_name(group.device)
        _log.info("%s", unknown_mfu(gpu, rate_kind(config.number_format, tf32=config.tf32)))
    # A user's model may need real values.
    is_built_in = run.extension.build_model is None and run.trainable.task.model is None
    if not continued and group.is_main and is_built_in:
        run.state.monitor.model(model_graph(partial(Decoder, config.model, manifest.vocab_size), manifest.row_length))


def warn_of_settings(context: RunContext, trainable: Trainable) -> None:
    for warning in settings_without_effect(
        context.config,
        device=context.group.device.type,
        num_ranks=context.group.world_size,
        watched=is_watched(context.config.watchdog.enabled),
        custom_loss=trainable.extension.custom_loss is not None or trainable.task.sums is not None,
        own_model=not isinstance(trainable.model, Decoder),
    ):
        _log.warning("%s", warning)

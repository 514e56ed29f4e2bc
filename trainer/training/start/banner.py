"""The lines that a start of a training logs."""

from __future__ import annotations

import logging
from functools import partial

import torch

from common.settings.load import AUTO
from trainer.config import TrainConfig, settings_without_effect
from trainer.context import RunContext
from trainer.machine.environment import unlocked_here
from trainer.machine.peak_rates import rate_kind, unknown_mfu
from trainer.metrics.sinks.tensorboard_graph import model_graph
from trainer.model.attention import describe_backend
from trainer.model.decoder import Decoder
from trainer.planning.lines import brief_lines
from trainer.planning.preparation import other_preparation
from trainer.training.start.ranks import is_watched
from trainer.training.trainable import Trainable
from trainer.training.training_run import TrainingRun

_log = logging.getLogger(__name__)


def introduce(run: TrainingRun, *, continued: bool) -> None:
    """Log the size of model, data and group and the settings without effect, and give the graph of a new model to the sinks."""
    context, manifest = run.context, run.context.manifest
    config, group = context.config, context.group
    _log.info("%s", _describe(run, continued=continued))
    if not continued and (other := other_preparation(config.recipe, manifest)):
        _log.info("%s", other)
    if not continued and config.recipe == AUTO:
        _log.info("%s", _chosen(config))
    _log.info("%s; attention %s", run.data.order.description, describe_backend(context.backend))
    if group.is_main:
        if unlocked := unlocked_here():
            _log.warning("%s; results may differ from those of an installation from the lock", unlocked)
        warn_of_settings(context, run.trainable)
        for line in brief_lines(run.reporter.forecast) if run.reporter.forecast is not None else ():
            _log.info("%s", line)
    if run.reporter.flops.peak is None and group.device.type == "cuda":
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
        watched=is_watched(context.config.watchdog),
        custom_loss=trainable.extension.custom_loss is not None or trainable.task.step is not None,
        own_model=not isinstance(trainable.model, Decoder),
    ):
        _log.warning("%s", warning)


def _describe(run: TrainingRun, *, continued: bool) -> str:
    config, group, manifest = run.context.config, run.context.group, run.context.manifest
    trained, total = run.trainable.num_trained, run.trainable.num_weights
    some = "" if trained == total else f", of which {trained / 1e6:.3g}M ({trained / total:.2%}) are trained"
    return (
        f"{f'resuming {config.run} at step {run.resumed.step}' if continued else f'training in {config.run}'}  "
        f"{total / 1e6:.2f}M weights{some}, vocabulary {manifest.vocab_size}, {len(run.data.train_rows)} training and "
        f"{len(run.data.val_rows)} validation rows of {manifest.row_length} tokens, "
        f"{group.world_size} rank{'s' * (group.world_size > 1)} on {group.device.type}, {config.number_format}"
    )


def _chosen(config: TrainConfig) -> str:
    model, limits = config.model, config.limits
    bounds = {name: getattr(limits, name) for name in ("minutes", "epochs", "steps", "tokens")}
    ends = " or ".join(f"limits.{name} = {value:g}" for name, value in bounds.items() if value is not None)
    return (
        f"recipe auto: {model.layers} layers of width {model.width}, {config.batch.global_batch_size} rows in a step, "
        f"{config.optim.kind}, until {ends}; settings that you give are kept (docs/guide/model-size.md)"
    )

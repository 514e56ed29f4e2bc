"""Builds the model of a run, and restores its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from trainer.checkpoint.of_run import load_whole
from trainer.finetuning.initial_weights import write_reference
from trainer.model.linear import convert_to_float8
from trainer.model.memory_estimate import check_model_size
from trainer.optim.optimizers import build_optimizers
from trainer.optim.weight_average import WeightAverage
from trainer.runs.adjustments import Adjustments
from trainer.runs.state import Progress, RunState
from trainer.training.adjuster import wrapped
from trainer.training.start.check import Continued
from trainer.training.start.plan import StartPlan
from trainer.training.trainable import Trainable, hold_reference, make_scaler, new_loss, new_model


@dataclass(frozen=True)
class Restored:
    trainable: Trainable
    adjustments: Adjustments  # those of earlier starts, and those that were needed to fit the model into memory
    state: RunState | None  # the state of the checkpoint; None for a new run

    @property
    def progress(self) -> Progress:
        return Progress() if self.state is None else self.state.progress


def build(plan: StartPlan, adjustments: Adjustments, step: int) -> tuple[Trainable, Adjustments]:
    """Return the model for a step with new weights, wrapped for training, and the adjustments, with those that it needed to fit."""
    context, extension, task = plan.context, plan.extension, plan.task
    config, group, vocab_size = context.config, context.group, context.manifest.vocab_size
    if extension.build_model is not None and config.model.base_width is not None:
        raise ConfigError("model.base_width scales the built-in model, and the extension builds another one; remove one of them")
    if extension.build_model is None:
        check_model_size(config.model, vocab_size, counted=task.num_weights, lora=config.lora)
    model = new_model(extension, task, config, vocab_size)
    if config.parallel == "ddp" or group.world_size == 1:
        model.to(group.device)  # FSDP moves each part when it shards the weights
    if config.number_format == "float8":
        convert_to_float8(model, group.device)
    loss = new_loss(model, extension, task, config.loss)
    module, accumulation, adjustments = wrapped(loss, context, adjustments, step)
    adapted = config.lora.rank is not None  # muP has no rule for adapters, so their rate is the given one at each width
    trainable = Trainable(
        context=context,
        extension=extension,
        task=task,
        loss=loss,
        module=module,
        accumulation=accumulation,
        scaler=make_scaler(context),
        optimizers=build_optimizers(
            model,
            config.optim,
            1.0 if adapted else config.model.width_ratio,
            None if config.reproducibility == "elastic" else group,  # the bits of a shared update depend on the number of ranks
        ),
        average=None if config.ema.decay is None else WeightAverage(model, config.ema),
    )
    return trainable, adjustments


def built_and_restored(plan: StartPlan, continued: Continued) -> Restored:
    """Build the model, and restore the newest checkpoint. For a new run load the weights that it begins with."""
    trainable, adjustments = build(plan, continued.adjustments, (continued.newest or 0) + 1)
    context, state = plan.context, None
    initial, origin = plan.initial, continued.initial
    if continued.newest is not None:
        checkpoint, state = load_whole(continued.checkpoints, continued.newest)
        trainable.restore(checkpoint, state)
    elif initial is not None and origin is not None:
        weights = context.group.on_all(lambda: initial.take(origin))
        trainable.begin_with(weights)
        if plan.task.reference is not None:
            context.group.on_main(lambda: write_reference(context.config.run, weights))
    elif (pretrained := plan.task.pretrained) is not None:
        trainable.begin_with(context.group.on_all(pretrained))
    if plan.task.reference is not None:
        hold_reference(context, plan.task, origin)
    return Restored(trainable, adjustments, state)

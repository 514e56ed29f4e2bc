"""Begins a new run with the weights of another run: `init`. Step, schedule, optimizer state and order of the data begin anew.

Rank 0 chooses the checkpoint and records its digest. Then each rank reads it, and compares the digest before the weights are used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from common.command_line import command_text
from common.errors import CheckpointError, ConfigError
from common.untrusted import digest_run_file
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.tokenizer import load_tokenizer
from trainer.checkpoint import Checkpoint
from trainer.checkpoint.weights import averaged_weights, weights_digest
from trainer.config import TrainConfig
from trainer.config.initial import differing_shape
from trainer.machine.environment import shown
from trainer.model.lora import merged_weights
from trainer.runs.directory import load_config
from trainer.runs.record import RECORD, Origin, read_record
from trainer.runs.state import load_checkpoint

__all__ = ["check_initial", "check_same_initial", "choose_initial", "read_initial"]

_log = logging.getLogger(__name__)


def check_initial(config: TrainConfig, manifest: Manifest) -> None:
    """Compare a new run with the run `init`: the shape of the model, and the tokenizer of the data. Do nothing without `init`.

    Raises:
        CheckpointError: there is no such run, or it is damaged.
        ConfigError: the two do not fit; the message says what to do.
    """
    if config.init is None:
        return
    if config.init.resolve() == config.run.resolve():
        raise ConfigError(f"{config.run}: init and run are the same folder; name a new folder for the run (--run)")
    read_record(config.init)
    initial = load_config(config.init).model
    if differing := differing_shape(config.model, initial):
        pairs = ", ".join(
            f"{name} is {shown(found)}, but {shown(needed)} in that run" for name, (found, needed) in differing.items()
        )
        raise ConfigError(
            f"init = {config.init}: its weights do not fit these settings: {pairs}; leave out {' and '.join(differing)}, because "
            "the shape of the model is taken from that run"
        )
    if load_tokenizer(config.init / "tokenizer").digest != manifest.tokenizer_digest:
        raise ConfigError(
            f"{config.data}: it was prepared with another tokenizer than that of init = {config.init}, so its ids mean other "
            f"tokens; prepare it again with: {command_text('prepare', '--tokenizer.path', config.init)} and its other options"
        )
    if config.model.context > initial.context:
        _log.warning(
            "model.context is %d, and %d in %s: the model has not learnt positions from %d on",
            *(config.model.context, initial.context, config.init, initial.context),
        )
    if config.model.rope_theta != initial.rope_theta:
        _log.warning(
            "model.rope_theta is %g, and %g in %s: the weights were trained with other rotations of the positions",
            *(config.model.rope_theta, initial.rope_theta, config.init),
        )


def choose_initial(config: TrainConfig) -> Origin | None:
    """Return the checkpoint of `init` with the digest of its weights; None without `init`.

    Raises:
        CheckpointError: the other run has no such checkpoint, or it is damaged.
    """
    if config.init is None:
        return None
    checkpoint = load_checkpoint(config.init, config.init_checkpoint, option="init_checkpoint")
    weights = weights_digest(_weights(config.init, checkpoint))
    return Origin(record=digest_run_file(config.init, RECORD), step=checkpoint.step, weights=weights)


def read_initial(init: Path, origin: Origin) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint of the run `init` by name, on the CPU: the moving average if the checkpoint has one.

    Adapters are merged into the matrices.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has other weights than `origin` says.
    """
    weights = _weights(init, load_checkpoint(init, str(origin.step), option="init_checkpoint"))
    if (found := weights_digest(weights)) != origin.weights:
        raise CheckpointError(
            f"init = {init}: the weights of step {origin.step} have the digest {found}, and {origin.weights} is needed; "
            "restore the checkpoint from a copy"
        )
    return weights


def check_same_initial(config: TrainConfig, continued: Path) -> None:
    """Refuse to continue the run `continued` with an `init` from which it did not begin. Its weights are in its checkpoints.

    The folder of the other run may be gone or may have moved, and its training may have continued.

    Raises:
        ConfigError: the run began with new weights, or those of a third run.
    """
    if config.init is None:
        return
    origin, other = read_record(continued).initial, "new weights"
    if origin is not None:
        recorded = load_config(continued)
        other = f"the weights of step {origin.step} of {recorded.init or 'another run'}"
        same_choice = recorded.init_checkpoint == config.init_checkpoint
        if same_choice and (recorded.init is None or recorded.init.resolve() == config.init.resolve()):
            return
        if (
            (config.init / RECORD).is_file()
            and digest_run_file(config.init, RECORD) == origin.record
            and (same_choice or config.init_checkpoint == str(origin.step))
        ):
            return
    raise ConfigError(
        f"{continued}: this run began with {other}, and init = {config.init} names others; leave out init to continue it, or use "
        "another --run"
    )


def _weights(run: Path, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    return merged_weights(averaged_weights(checkpoint), load_config(run).lora)

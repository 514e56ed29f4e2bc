"""Begins a new run with the weights of another run: `init`. Step, schedule, optimizer and data order start over.

Rank 0 chooses the checkpoint and records its digest. Then each rank reads it, and compares the digest before the weights are used.
Some tasks compare the trained model with a frozen copy of these weights. A run keeps them in one file, because the run that they
come from may be removed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from common.command_line import command_text
from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, open_input, own_folder, unfinished_path
from common.untrusted import digest_run_file
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.tokenizer import load_tokenizer
from trainer.checkpoint.of_run import averaged_weights, load_checkpoint, weights_digest
from trainer.checkpoint.tensor_file import decode_tensors, write_tensor_file
from trainer.config import TrainConfig
from trainer.config.model import differing_shape
from trainer.machine.environment import shown
from trainer.model.lora import merged_weights
from trainer.runs.layout import RECORD, REFERENCE
from trainer.runs.record import Origin
from trainer.runs.saved_run import SavedRun

_log = logging.getLogger(__name__)


class InitialRun:
    """The run `init`, whose files are read once. Nothing is read before a method asks for it."""

    def __init__(self, init: Path) -> None:
        self._saved = SavedRun(init)
        self._chosen: tuple[int, Mapping[str, Tensor]] | None = None  # step and weights of `choose`, until they are used

    def check(self, config: TrainConfig, manifest: Manifest) -> None:
        """Compare a new run with it: the shape of the model, and the tokenizer of the data."""
        init = self._saved.path
        if init.resolve() == config.run.resolve():
            raise ConfigError(f"{config.run}: init and run are the same folder; name a new folder for the run (--run)")
        _ = self._saved.record  # raises an error if it is not a run
        initial = self._saved.config.model
        if differing := differing_shape(config.model, initial):
            pairs = ", ".join(
                f"{name} is {shown(found)}, but {shown(needed)} in that run" for name, (found, needed) in differing.items()
            )
            raise ConfigError(
                f"init = {init}: its weights do not fit these settings: {pairs}; leave out {' and '.join(differing)}, because "
                "the shape of the model is taken from that run"
            )
        if load_tokenizer(init / "tokenizer").digest != manifest.tokenizer_digest:
            raise ConfigError(
                f"{config.data}: it was prepared with another tokenizer than that of init = {init}, so its ids mean other "
                f"tokens; prepare it again with: {command_text('prepare', '--tokenizer.path', init)} and its other options"
            )
        if config.model.context > initial.context:
            _log.warning(
                "model.context is %d, and %d in %s: the model has not learnt positions from %d on",
                *(config.model.context, initial.context, init, initial.context),
            )
        for name in ("rope_theta", "rope_scaling"):
            if (value := getattr(config.model, name)) != (before := getattr(initial, name)):
                _log.warning(
                    "model.%s is %s, and %s in %s: the weights were trained with other rotations of the positions",
                    *(name, *(f"{one:g}" if isinstance(one, float) else one for one in (value, before)), init),
                )

    def choose(self, which: str) -> Origin:
        """Return the checkpoint that `which` names, with the digest of its weights."""
        step, weights = self._load(which)
        self._chosen = step, weights
        advice = self._saved.record.generation
        more = {} if advice is None else {"generation": advice}
        return Origin(record=self._saved.record_digest, step=step, weights=weights_digest(weights), **more)

    def take(self, origin: Origin) -> Mapping[str, Tensor]:
        """Return the weights of the checkpoint `origin`. They are kept no longer."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None and chosen[0] == origin.step:
            return chosen[1]  # their digest is that of `origin`
        _, weights = self._load(str(origin.step))
        if (found := weights_digest(weights)) != origin.weights:
            raise CheckpointError(
                f"init = {self._saved.path}: the weights of step {origin.step} have the digest {found}, and {origin.weights} is "
                "needed; restore the checkpoint from a copy"
            )
        return weights

    def _load(self, which: str) -> tuple[int, Mapping[str, Tensor]]:
        checkpoint = load_checkpoint(self._saved, which, option="init_checkpoint")
        return checkpoint.step, merged_weights(averaged_weights(checkpoint), self._saved.config.lora)


def check_lora(config: TrainConfig) -> None:
    """Refuse adapters in a new run with new weights: they would be trained on matrices that stay random."""
    if config.lora.rank is not None and config.init is None:
        raise ConfigError(
            f"lora.rank = {config.lora.rank} trains adapters and not the model, so the model must be trained already, and init is "
            "not set; name the run with the trained model (--init RUN), or leave out lora.rank to train all weights"
        )


def check_same_initial(config: TrainConfig, continued: SavedRun) -> None:
    """Refuse another `init` than the continued run began with. The folder of the other run may be gone or may have moved."""
    if config.init is None:
        return
    origin, other = continued.record.initial, "new weights"
    if origin is not None:
        recorded = continued.config
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
        f"{continued.path}: this run began with {other}, and init = {config.init} names others; leave out init to continue it, or "
        "use another --run"
    )


def write_reference(run: Path, weights: Mapping[str, Tensor]) -> None:
    own_folder((run / REFERENCE).parent)
    temporary = unfinished_path(run / REFERENCE)
    try:
        write_tensor_file(temporary, weights)
        temporary.rename(run / REFERENCE)
    finally:
        temporary.unlink(missing_ok=True)


def read_reference(run: Path, digest: str) -> Mapping[str, Tensor]:
    path = run / REFERENCE
    remedy = "restore it from a copy, or begin a new run with --init"
    try:
        with open_input(path, below=run) as file:
            weights = decode_tensors(bytearray(file.read()))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the initial weights are missing, and objective = preference needs them; {remedy}") from None
    except (ValueError, UnusableFileError, OSError) as error:
        raise CheckpointError(f"{path}: the initial weights cannot be read ({error}); {remedy}") from None
    if (found := weights_digest(weights)) != digest:
        raise CheckpointError(f"{path}: the weights have the digest {found}, and the run began with {digest}; {remedy}")
    return weights

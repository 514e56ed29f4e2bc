"""The decoder of a checkpoint: weights, tokenizer and settings, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from common.errors import CheckpointError
from data_pipeline.conversations.chat_template import ChatTemplate, saved_template
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint.of_run import averaged_weights, load_checkpoint, weights_digest
from trainer.config import TrainConfig
from trainer.model.decoder import weight_shapes
from trainer.model.lora import is_adapter, merged_weights
from trainer.model.memory_estimate import check_model_size
from trainer.runs.record import Record
from trainer.runs.saved_run import SavedRun


@dataclass(frozen=True)
class SavedDecoder:
    run: Path
    config: TrainConfig
    record: Record
    tokenizer: Tokenizer
    step: int
    manifest_digest: str  # digest of the checkpoint's manifest, which has the digests of all its tensors
    weights: Mapping[str, Tensor]  # By name, on the CPU, in fp32. A shared weight appears once.
    is_average: bool
    chat_template: ChatTemplate | None = None
    adapters: Mapping[str, Tensor] = field(default_factory=dict)  # by name, CPU, fp32; empty without. `weights` has their products.

    @property
    def data_digest(self) -> str | None:
        # None for an imported model
        return self.record.data.root_digest or None

    @cached_property
    def weights_digest(self) -> str:
        return weights_digest(self.weights)


def open_decoder(saved_run: SavedRun, which: str, *, option: str = "--checkpoint") -> SavedDecoder:
    """`which` names the checkpoint: `latest`, `best` or a step. `option` is for messages."""
    run, config = saved_run.path, saved_run.config
    checkpoint = load_checkpoint(saved_run, which, option=option)
    tokenizer = load_tokenizer(run / "tokenizer")
    saved = averaged_weights(checkpoint)
    weights = merged_weights(saved, config.lora)
    check_model_size(config.model, tokenizer.vocab_size, sum(tensor.numel() for tensor in weights.values()))
    wanted = weight_shapes(config.model, tokenizer.vocab_size)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{run}: in the checkpoint of step {checkpoint.step} the shape of the weight {name} is {found.get(name, 'missing')}"
                f", and the settings of the run need {wanted.get(name, 'no such weight')}; restore the run from a copy"
            )
    return SavedDecoder(
        run=run,
        config=config,
        record=saved_run.record,
        tokenizer=tokenizer,
        step=checkpoint.step,
        manifest_digest=saved_run.manifest_digest(checkpoint.step),
        weights={name: weights[name].float() for name in sorted(weights)},
        is_average=bool(checkpoint.average),
        chat_template=saved_template(run / "tokenizer", tokenizer),
        adapters={name: tensor.float() for name, tensor in sorted(saved.items()) if is_adapter(name)},
    )

"""Makes a run of a model in a Hugging Face directory: the tokenizer, and its weights as the checkpoint of step 0.

The run was never trained, so it has no metrics, no ledger and no data. All commands that use a model take it. A training cannot
continue it, but begins a new run with its weights (`init`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.targets import new_folder
from common.untrusted import digest_run_file
from data_pipeline.conversations.chat_template import ChatTemplate, published_template
from data_pipeline.tokenizer import Tokenizer, open_supplied
from trainer.config import ModelConfig, TrainConfig
from trainer.inference.chat import end_of_turn_id
from trainer.interop.architecture import CONFIG, read_architecture
from trainer.interop.published_weights import open_weights
from trainer.interop.untrained import write_untrained
from trainer.model.bounds import check_model_size
from trainer.model.decoder import weight_shapes
from trainer.runs.record import IMPORTED

__all__ = ["Imported", "import_model"]

_ROWS = 8
"""Rows of a forward pass in an evaluation."""


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    model_type: str
    num_weights: int
    types: tuple[str, ...]
    vocab_size: int
    lacking: tuple[str, ...]
    """The roles `bos` and `eos` that no token of the tokenizer has."""
    weights: str
    has_chat_template: bool
    template_refused: str | None
    """Why the chat template of the directory is not in the run."""


def import_model(directory: Path, output: Path) -> Imported:
    """Write the new run `output` from a Hugging Face directory of a Qwen3 or Llama model. Nothing in the directory is executed.

    The run appears at once and complete, or not at all.

    Raises:
        ConfigError: the directory holds no such model, or `output` exists.
        CheckpointError: a file with weights is damaged.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; name the Hugging Face directory with config.json and the weights")
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists already; name a new folder (--output)")
    architecture = read_architecture(directory)
    tokenizer = open_supplied(directory, {})
    model = _with_vocabulary(directory, architecture.model, tokenizer)
    check_model_size(model, tokenizer.vocab_size)
    template, refused = _chat_template(directory, tokenizer)
    published = open_weights(directory, weight_shapes(model, tokenizer.vocab_size))
    weights, files = published.read()
    config = _settings(directory, output, model)
    source = {
        "format": "hugging_face",
        "model_type": architecture.model_type,
        "types": list(published.types),
        "files": files | {CONFIG: digest_run_file(directory, CONFIG)},
    }
    with new_folder(output) as folder:
        digest = write_untrained(folder, config, tokenizer, weights, status=IMPORTED, source=source, chat_template=template)
    num_weights = sum(weight.numel() for weight in weights.values())
    lacking = tuple(role for role, number in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)) if number is None)
    return Imported(
        model_type=architecture.model_type,
        num_weights=num_weights,
        types=published.types,
        vocab_size=tokenizer.vocab_size,
        lacking=lacking,
        weights=digest,
        has_chat_template=template is not None,
        template_refused=refused,
    )


def _chat_template(directory: Path, tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Return the chat template of the directory, and why it is left out if no conversation can use it."""
    source = published_template(directory)
    if source is None:
        return None, None
    try:
        end_of_turn_id(ChatTemplate.of(source, tokenizer), tokenizer)
    except ConfigError as error:
        return None, str(error)
    return source, None


def _with_vocabulary(directory: Path, model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the settings, with `vocab_rows` only if padding the vocabulary does not give the number of rows."""
    assert model.vocab_rows is not None
    if model.vocab_rows < tokenizer.vocab_size:
        raise ConfigError(
            f"{directory}: its tokenizer has {tokenizer.vocab_size} tokens, and vocab_size in {CONFIG} is {model.vocab_rows}; each "
            "token needs a row of the embedding, so they belong to two models"
        )
    padded = model.model_copy(update={"vocab_rows": None})
    return padded if padded.padded_vocab(tokenizer.vocab_size) == model.vocab_rows else model


def _settings(directory: Path, output: Path, model: ModelConfig) -> TrainConfig:
    """Return settings for the commands that use the model. Those of the training have no meaning."""
    return TrainConfig.model_validate(
        {
            "data": directory.absolute(),
            "run": output,
            "precision": "fp32",
            "limits": {"steps": 1},
            "batch": {"global_rows": _ROWS, "micro": _ROWS},
            "model": model.model_dump(),
        }
    )

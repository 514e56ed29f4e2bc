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
from data_pipeline.tokenizer import open_supplied
from trainer.config import TrainConfig
from trainer.inference.chat import end_of_turn_id
from trainer.interop.architecture import CONFIG, read_architecture
from trainer.interop.published_weights import open_weights
from trainer.interop.untrained import write_untrained
from trainer.model.bounds import check_model_size
from trainer.model.decoder import weight_shapes
from trainer.runs.record import IMPORTED

_ROWS = 8  # rows of a forward pass in an evaluation


@dataclass(frozen=True)
class ImportedModel:
    model_type: str
    num_weights: int
    types: tuple[str, ...]
    vocab_size: int
    lacking: tuple[str, ...]  # the roles `bos` and `eos` that no token of the tokenizer has
    weights: str
    has_chat_template: bool
    template_refused: str | None  # why the chat template of the directory is not in the run


def import_model(directory: Path, output: Path) -> ImportedModel:
    """Write the new run `output`, complete or not at all. Nothing in the directory is executed."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; name the Hugging Face directory with config.json and the weights")
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists already; name a new folder (--output)")
    architecture, tokenizer = read_architecture(directory), open_supplied(directory, {})
    model, size = architecture.model, tokenizer.vocab_size
    assert model.vocab_rows is not None
    if model.vocab_rows < size:
        raise ConfigError(
            f"{directory}: its tokenizer has {size} tokens, and vocab_size in {CONFIG} is {model.vocab_rows}; each token needs a "
            "row of the embedding, so they belong to two models"
        )
    padded = model.model_copy(update={"vocab_rows": None})
    model = padded if padded.padded_vocab(size) == model.vocab_rows else model
    check_model_size(model, size)
    template, refused = published_template(directory), None
    if template is not None:
        try:
            end_of_turn_id(ChatTemplate.of(template, tokenizer), tokenizer)
        except ConfigError as error:  # no conversation can use it
            template, refused = None, str(error)
    published = open_weights(directory, weight_shapes(model, size))
    weights, files = published.read()
    config = TrainConfig.model_validate(
        {
            "data": directory.absolute(),
            "run": output,
            "precision": "fp32",
            "limits": {"steps": 1},  # settings of the training have no meaning
            "batch": {"global_batch_size": _ROWS, "micro_batch_size": _ROWS},
            "model": model.model_dump(),
        }
    )
    source = {
        "format": "hugging_face",
        "model_type": architecture.model_type,
        "types": list(published.types),
        "files": files | {CONFIG: digest_run_file(directory, CONFIG)},
    }
    with new_folder(output) as folder:
        digest = write_untrained(folder, config, tokenizer, weights, status=IMPORTED, source=source, chat_template=template)
    return ImportedModel(
        model_type=architecture.model_type,
        num_weights=sum(weight.numel() for weight in weights.values()),
        types=published.types,
        vocab_size=size,
        lacking=tuple(role for role, number in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)) if number is None),
        weights=digest,
        has_chat_template=template is not None,
        template_refused=refused,
    )

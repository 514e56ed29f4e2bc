"""Makes a run of a model in a Hugging Face directory: the tokenizer, and its weights as the checkpoint of step 0.

The run was never trained, so it has no metrics, no ledger and no data. All commands that use a model take it. A training cannot
continue it, but begins a new run with its weights (`init`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import ConfigError
from common.files import write_atomic
from common.settings.dotted import to_toml
from common.targets import new_folder
from common.untrusted import digest_run_file
from data_pipeline.conversations.chat_template import TEMPLATE_FILE, ChatTemplate, published_template
from data_pipeline.tokenizer import Tokenizer, open_supplied, save_tokenizer
from trainer.checkpoint.of_run import weights_digest
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.config import GuardConfig, TrainConfig
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.inference.conversation import end_of_turn_id
from trainer.interop.architecture import CONFIG as PUBLISHED_CONFIG
from trainer.interop.architecture import read_architecture
from trainer.interop.fused import from_fused, fused_shapes
from trainer.interop.gemma import from_gemma
from trainer.interop.generation import read_generation
from trainer.interop.gpt2 import from_gpt2, published_shapes
from trainer.interop.hub import PublishedDirectory, published_directory
from trainer.interop.published_weights import read_weights
from trainer.machine.environment import environment_facts
from trainer.model.decoder import weight_shapes
from trainer.model.memory_estimate import check_model_size
from trainer.runs.layout import CONFIG, TOKENIZER
from trainer.runs.progress import LedgerHead, Progress
from trainer.runs.record import IMPORTED, Record, write_record
from trainer.runs.state import RunState

_ROWS = 8  # rows of a forward pass in an evaluation


@dataclass(frozen=True)
class ImportedModel:
    model_type: str
    num_weights: int
    types: tuple[str, ...]
    vocab_size: int
    has_eos: bool
    weights: str
    has_chat_template: bool
    template_refused: str | None  # why the chat template of the directory is not in the run


def import_model(directory: Path, output: Path) -> ImportedModel:
    """Write the new run `output`, complete or not at all. Nothing in the directory is executed."""
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists already; name a new folder (--output)")
    with published_directory(directory, output.parent) as published:
        return _import(published, output)


def _import(published: PublishedDirectory, output: Path) -> ImportedModel:
    directory = published.path
    (model_type, model), tokenizer = read_architecture(directory), open_supplied(directory, {})
    size = tokenizer.vocab_size
    assert model.vocab_rows is not None
    if model.vocab_rows < size:
        raise ConfigError(
            f"{directory}: its tokenizer has {size} tokens, and vocab_size in config.json is {model.vocab_rows}; each token needs "
            "a row of the embedding, so they belong to two models"
        )
    padded = model.model_copy(update={"vocab_rows": None})
    model = padded if padded.padded_vocab(size) == model.vocab_rows else model
    check_model_size(model, size)
    advice = read_generation(directory, PUBLISHED_CONFIG, tokenizer)
    template, refused = published_template(directory), None
    if template is not None:
        try:
            end_of_turn_id(ChatTemplate.of(template, tokenizer), tokenizer)
        except ConfigError as error:  # no conversation can use it
            template, refused = None, str(error)
    shapes = weight_shapes(model, size)
    is_fused = model_type == "phi3"
    weights, types, files = read_weights(directory, fused_shapes(shapes) if is_fused else published_shapes(model, shapes))
    if is_fused:
        weights = from_fused(weights, shapes)
    elif model.is_gpt2:
        weights = from_gpt2(weights, model)
    elif model.has_post_norms:
        weights = from_gemma(weights)
    config = TrainConfig.model_validate(
        {
            "data": published.source.absolute(),
            "run": output,
            "precision": "fp32",
            "limits": {"steps": 1},  # settings of the training have no meaning
            "batch": {"global_batch_size": _ROWS, "micro_batch_size": _ROWS},
            "model": model.model_dump(),
        }
    )
    source = {
        "format": "hugging_face",
        **published.hub,
        "model_type": model_type,
        "types": list(types),
        "generation": advice,
        "files": files | {PUBLISHED_CONFIG: digest_run_file(directory, PUBLISHED_CONFIG)},
    }
    with new_folder(output) as folder:
        digest = write_untrained(folder, config, tokenizer, weights, status=IMPORTED, source=source, chat_template=template)
    return ImportedModel(
        model_type=model_type,
        num_weights=sum(weight.numel() for weight in weights.values()),
        types=types,
        vocab_size=size,
        has_eos=tokenizer.eos_id is not None,
        weights=digest,
        has_chat_template=template is not None,
        template_refused=refused,
    )


def write_untrained(
    run: Path,
    config: TrainConfig,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    *,
    status: str,
    source: Mapping[str, Any],
    data_digest: str = "",
    chat_template: str | None = None,
) -> str:
    """Write into an empty directory, which the caller commits. Return the digest of the tensors. `status` also names `source`."""
    write_atomic(run / CONFIG, to_toml("train", config.model_dump(mode="json")).encode())
    save_tokenizer(tokenizer, run / TOKENIZER)
    if chat_template is not None:
        write_atomic(run / TOKENIZER / TEMPLATE_FILE, chat_template.encode())
    store = CheckpointStore.of(run)
    state = RunState(Progress(), {}, Guard(GuardConfig()).state, LossMean().state, LedgerHead())
    store.save(Checkpoint(0, tensors, {}, state.to_json()))
    digest = weights_digest(tensors)
    names = [CONFIG, *sorted(f"{TOKENIZER}/{path.name}" for path in (run / TOKENIZER).iterdir())]
    names.append(store.manifest_path(0).relative_to(run).as_posix())
    record = Record.model_validate(
        {
            "format": 1,
            "status": status,
            "identity": {},
            "changes": [],
            "data": {"root_digest": data_digest, "tokenizer_digest": tokenizer.digest},
            "environment": environment_facts() | {"world_size": 1},
            "earlier": [],
            status: dict(source),
            "files": {name: digest_run_file(run, name) for name in names},
            "step": 0,
            "weights": digest,
        }
    )
    write_record(run, record)
    return digest

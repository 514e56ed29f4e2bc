"""Makes a run of a model in a Hugging Face directory: the tokenizer, and its weights as the checkpoint of step 0.

The run was never trained, so it has no metrics, no ledger and no data. All commands that use a model take it. A training cannot
continue it, but begins a new run with its weights (`init`).

The directory is on this machine, or on the Hugging Face Hub under its name. The Hub's client keeps the files of a model in a cache,
as links to other files of it. Links of strangers are never followed, so an import reads a folder with the same files and without
links.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from common.errors import ConfigError, ProjectError
from common.files import write_atomic
from common.redaction import redacted
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
from trainer.interop.generation import read_generation
from trainer.interop.published_weights import read_weights
from trainer.interop.weight_layouts import from_fused, from_gemma, from_gpt2, fused_shapes, published_shapes
from trainer.machine.environment import environment_facts
from trainer.model.decoder import weight_shapes
from trainer.model.memory_estimate import check_model_size
from trainer.runs.layout import CONFIG, TOKENIZER
from trainer.runs.record import IMPORTED, Record, write_record
from trainer.runs.state import LedgerHead, Progress, RunState

_ROWS = 8  # rows of a forward pass in an evaluation
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_READ = ("*.json", "*.safetensors", "*.model", "*.jinja")
_NOT_READ = ("*/*", "consolidated*")  # folders with other formats, and Mistral's second copy of the weights


@dataclass(frozen=True)
class PublishedDirectory:
    path: Path  # has no links to files of the Hub's cache
    source: Path  # what the record names
    hub: Mapping[str, str] = field(default_factory=dict)  # repository and commit, if it is of the Hub


@contextmanager
def published_directory(named: Path, beside: Path) -> Iterator[PublishedDirectory]:
    """Yield the directory `named`, or that of the model `organisation/name[@revision]` of the Hub, which is downloaded if needed.

    A folder of the Hub's cache gets hard links, or copies on another file system, in a temporary folder in `beside`.
    """
    source = named if named.is_dir() else _downloaded(named)
    cached = source.absolute()
    repository, commit = cached.parent.parent, cached.name
    blobs = repository / "blobs"
    if cached.parent.name != "snapshots" or not repository.name.startswith("models--") or not blobs.is_dir():
        yield PublishedDirectory(source, source)
        return
    beside.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".import-", dir=beside) as folder:
        for entry in sorted(cached.iterdir()):
            if entry.is_file():
                _link(entry, blobs.resolve(), Path(folder) / entry.name)
        name = repository.name.removeprefix("models--").replace("--", "/")
        try:
            yield PublishedDirectory(Path(folder), source, {"repository": name, "commit": commit})
        except ProjectError as error:
            raise type(error)(str(error).replace(folder, str(source))) from error


def _link(entry: Path, blobs: Path, target: Path) -> None:
    real = entry.resolve()
    if entry.is_symlink() and real.parent != blobs:
        raise ConfigError(f"{entry}: a link to {real}, outside of {blobs}; download the model again")
    try:
        os.link(real, target)
    except OSError:  # another file system, or a file of another user
        shutil.copyfile(real, target)


def _downloaded(named: Path) -> Path:
    name = _NAME.fullmatch(str(named))
    if name is None:
        raise ConfigError(
            f"{named}: no such directory; name the Hugging Face directory with config.json and the weights, or a model of the "
            "Hub as organisation/name"
        )
    from httpx2 import HTTPError  # noqa: PLC0415 - with the next line half a second, for an import by name alone
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    repository, revision = name["repository"], name["revision"]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_READ), ignore_patterns=list(_NOT_READ)))
    except errors.GatedRepoError:
        raise ConfigError(f"{repository}: its owner asks for consent; agree on its page of the Hub, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{named}: no such directory, and the Hub shows no model {repository} to this account; correct the name, or set "
            "HF_TOKEN if the model is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{named}: {repository} has no revision {revision}; name a branch, a tag or a commit") from None
    except (OSError, ValueError, HTTPError) as error:
        at = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"{named}: no such directory, and the model cannot be downloaded ({redacted(str(error).splitlines()[0])}); run on a "
            f"machine with a network: hf download {repository}{at} --local-dir models/{repository.partition('/')[2]}, and import "
            "that directory"
        ) from None


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

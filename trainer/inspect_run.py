"""Looking at a run that is finished or still going: evaluate or generate from one of its checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

from common.errors import CheckpointError, ConfigError, PreparedDataError
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.messages import explain
from common.settings.toml import parse_toml
from common.untrusted import read_run_file
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainConfig
from trainer.data.adjustments import Changes
from trainer.distributed.devices import check_no_gpu_is_hidden
from trainer.distributed.group import joined_group
from trainer.evaluate import Grouping, evaluate
from trainer.extension import seeded_model
from trainer.generate import TextModel
from trainer.limits import check_model_size, most_rows
from trainer.machine.determinism import configure_determinism
from trainer.model.attention import choose_backend
from trainer.model.forward import LossModule
from trainer.parallel.fsdp import load_full
from trainer.record import read_record
from trainer.score_table import describe_evaluation
from trainer.state import load_whole
from trainer.trust import run_extension

__all__ = ["data_folder", "evaluate_run", "load_checkpoint", "load_config", "load_model", "opened_text_model", "settings_here"]

_RESTORE = "put the file back as the run wrote it, or use another run"


def load_config(run: Path) -> TrainConfig:
    """The settings that a run was last started with.

    Raises:
        CheckpointError: the directory holds no run, or its settings are damaged.
    """
    path = run / "config.toml"
    try:
        config = TrainConfig.model_validate(parse_toml(read_run_file(path, MAX_SETTINGS_BYTES, run))["train"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{run}: no config.toml, so this is no run; name a directory that `trainer train --run` wrote"
        ) from None
    except ValidationError as error:
        raise CheckpointError(f"{path}: {explain(TrainConfig, error)}; {_RESTORE}") from None
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: no settings of a training can be read ({error}); {_RESTORE}") from None
    if config.batch.micro == "auto":
        raise CheckpointError(f"{path}: batch.micro = auto, but a run writes the number that it chose; {_RESTORE}")
    return config


def data_folder(run: Path, data: Path | None) -> Path:
    """Where the prepared data of a run is: `data`, or where its settings say.

    Raises:
        CheckpointError: the directory holds no run, or its settings are damaged.
        PreparedDataError: there is none where its settings say.
    """
    if data is not None:
        return data
    named = load_config(run).data
    if not _is_there(named / MANIFEST):
        why = "" if named.is_absolute() else f": the run names it {named}, as seen from where it was trained"
        raise PreparedDataError(
            f"{run}: its data was looked for in {named.absolute()}, and no {MANIFEST} is there{why}; name its folder with --data"
        )
    return named


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def settings_here(config: TrainConfig) -> TrainConfig:
    """The settings with which this machine can look at a run: no more threads than cores; without a GPU, the attention of a CPU.

    The precision stays, because CPUs compute in all of them: a float8 run is looked at in bf16 on any machine.

    Raises:
        ConfigError: this machine has GPUs, and torch sees none.
    """
    cores = len(os.sched_getaffinity(0))
    if config.threads is not None and config.threads > cores:
        config = config.model_copy(update={"threads": cores})
    if torch.cuda.is_available():
        return config
    if config.device != "cpu":
        check_no_gpu_is_hidden()
    attention = "auto" if config.attention in ("varlen", "flex") else config.attention
    return config.model_copy(update={"device": "cpu", "attention": attention})


def load_checkpoint(run: Path, which: str) -> Checkpoint:
    """The checkpoint called `latest`, `best` or by its step, verified.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    store = CheckpointStore(run / "checkpoints")
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{run}: no checkpoint is there yet; train until the first is saved")
    if which not in ("latest", "best") and not which.isdecimal():
        raise CheckpointError(f"--checkpoint {which}: use latest, best, or one of the steps {', '.join(map(str, steps))}")
    if which.isdecimal():
        return load_whole(store, int(which))
    latest = load_whole(store, steps[-1])
    best = latest.state["progress"].get("best_step")
    return latest if which == "latest" or best is None else load_whole(store, best)


def load_model(run: Path, config: TrainConfig, which: str, *, trust_code: bool = False) -> tuple[nn.Module, int]:
    """The model of a checkpoint with the averaged weights if there are any, and its step.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged.
        ConfigError: the model is code that came with the run, and `trust_code` does not allow to execute it.
    """
    extension = run_extension(run, read_record(run)["identity"].get("extension"), trust_code=trust_code)
    checkpoint = load_checkpoint(run, which)
    tokenizer = load_tokenizer(run / "tokenizer")
    weights = checkpoint.average or checkpoint.model
    if extension.build_model is None:  # before memory is taken for what the settings say, which the checkpoint may not fit
        check_model_size(config.model, tokenizer.vocab_size, sum(tensor.numel() for tensor in checkpoint.model.values()))
    model = seeded_model(extension, config.model, tokenizer.vocab_size, config.seed)
    load_full(model, weights)
    return model.eval(), checkpoint.step


def evaluate_run(
    run: Path,
    which: str,
    *,
    data: Path | None = None,
    limit: int | None = None,
    by: Sequence[str] = (),
    as_json: bool,
    trust_code: bool = False,
) -> str:
    """Validation loss, perplexity and bits per byte of a checkpoint, for people or as a JSON object.

    Args:
        run: directory of the run.
        which: the checkpoint, see `load_checkpoint`.
        data: prepared data other than that of the run.
        limit: validation rows to use, spread evenly; none: as the run has evaluated.
        by: the groups to show: source, kind, length.
        as_json: one JSON object instead of text.
        trust_code: code that came with the run may be executed; see `trainer.trust`.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged.
        ConfigError: code of the run needs consent, or the data has another tokenizer, or rows that are too long for the model.
        PreparedDataError: the data is missing or damaged, or has no validation rows.
    """
    config = settings_here(load_config(run))
    configure_determinism(config)
    directory = data_folder(run, data)
    with reading(directory, f"evaluate of run {run.absolute().name}"):
        manifest, tokenizer = read_manifest(directory), load_tokenizer(run / "tokenizer")
        rows = Rows(directory, manifest, "val", verify=config.verify_data)
        _check_fit(run, directory, manifest, tokenizer, len(rows), config.model.context)
        settings = config.eval if limit is None else config.eval.model_copy(update={"max_rows": limit})
        micro = min(settings.micro or config.batch.micro_rows, most_rows(config.model, manifest.row_length))
        settings = settings.model_copy(update={"micro": micro})
        with joined_group(config.device) as group:
            model, step = load_model(run, config, which, trust_code=trust_code)
            model.to(group.device)
            lost = _quarantined(run, manifest, step)
            backend = choose_backend(
                config.attention,
                group.device,
                config.precision,
                config.model.head_size,
                compiled=False,
            )
            result = evaluate(
                LossModule(model, config.loss),
                backend,
                rows.without(lost),
                config.model_copy(update={"eval": settings}),
                group,
                grouping=Grouping.of(manifest, tokenizer),
            )
    left_out = rows.num_rows_in(lost, np.arange(len(rows)))
    if not as_json:
        note = f"\n\nleft out, as by the run: {left_out:,} of {len(rows):,} rows, of shards in quarantine" if left_out else ""
        return describe_evaluation(result, step, by) + note
    total = {"val_loss" if name == "loss" else name: value for name, value in result.total.to_json().items()}
    groups = {f"by_{name}": {group: score.to_json() for group, score in result.groups[name].items()} for name in by}
    return json.dumps({"step": step, **total, "rows": result.num_rows, "left_out": left_out, **groups}, ensure_ascii=False)


def _quarantined(run: Path, manifest: Manifest, step: int) -> frozenset[str]:
    """The shards that a run had put into quarantine by a step; of other data than its own, none."""
    record = read_record(run)
    if manifest.root_digest != record["data"]["root_digest"]:
        return frozenset()
    return Changes.from_json(record.get("changes", ())).quarantined(step)


def _check_fit(run: Path, data: Path, manifest: Manifest, tokenizer: Tokenizer, num_rows: int, context: int) -> None:
    """Raises where the model of a run cannot be evaluated on the data."""
    if manifest.tokenizer_digest != tokenizer.digest:
        raise ConfigError(
            f"{data}: its tokenizer is {manifest.tokenizer_digest}, but {run} was trained with {tokenizer.digest}, so its tokens "
            "mean something else to this model; prepare the text with the tokenizer of the run. Models with different tokenizers "
            "are compared by their bits per byte, each on the same text with its own tokenizer"
        )
    if manifest.row_length > context:
        raise ConfigError(
            f"{data}: its rows have {manifest.row_length} tokens, but the model of {run} sees {context} (model.context); "
            f"prepare it with --row_length {context}"
        )
    if not num_rows:
        raise PreparedDataError(f"{data}: no validation rows; prepare from more text")


@contextmanager
def opened_text_model(run: Path, which: str, *, use_cache: bool = True, trust_code: bool = False) -> Iterator[TextModel]:
    """The model of a checkpoint with its tokenizer, on the device of the run if it is here, to write text with.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged.
        ConfigError: code of the run needs consent; see `trainer.trust`.
    """
    config = settings_here(load_config(run))
    configure_determinism(config)
    with joined_group(config.device) as group:
        model, _ = load_model(run, config, which, trust_code=trust_code)
        yield TextModel(model.to(group.device), load_tokenizer(run / "tokenizer"), config.model.context, use_cache)

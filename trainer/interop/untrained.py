"""Runs that hold a model and were never trained: an imported or a compressed one. It is their checkpoint of step 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from common.files import write_atomic
from common.settings.toml import to_toml
from common.untrusted import digest_run_file
from data_pipeline.conversations.chat_template import TEMPLATE_FILE
from data_pipeline.tokenizer import Tokenizer, save_tokenizer
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.checkpoint.weights import weights_digest
from trainer.config import GuardConfig, TrainConfig
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.machine.environment import environment_facts
from trainer.runs.layout import CONFIG, TOKENIZER
from trainer.runs.progress import LedgerHead, Progress
from trainer.runs.record import Record, write_record
from trainer.runs.state import RunState


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

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.errors import ConfigError
from common.settings.model import Place
from trainer.commands.run_options import CheckpointOptions


class ClassifyOptions(CheckpointOptions):
    """Prints the label of each text, with the probability of each label, as a JSON object in a line."""

    files: Annotated[tuple[Path, ...], Place(metavar="FILE", positional=True)] = Field(
        min_length=1, description="Files with texts: one text in each line of a .jsonl file; any other file is one text."
    )
    field: Annotated[str, Place(metavar="NAME")] = Field(
        "text", min_length=1, description="Name of the field that holds the text in a .jsonl file."
    )
    lines: bool = Field(False, description="Read each line of a file as one text, also if it is not a .jsonl file.")
    source: Annotated[str | None, Place(metavar="NAME")] = Field(
        None, description="Source of the data whose cleaning the texts get; none: that of all sources, which must be the same."
    )
    batch: int = Field(16, ge=1, le=65536, description="Number of texts that are classified together.")


def run(options: ClassifyOptions) -> None:
    from trainer.commands.saved_model import opened_model
    from trainer.finetuning.classification import classified
    from trainer.finetuning.cleaning import opened_cleaning
    from trainer.inference.conversation import read_texts
    from trainer.machine.determinism import settings_here
    from trainer.runs.saved_run import SavedRun

    run, saved = options.run, SavedRun(options.run)
    config = settings_here(saved.config)
    if config.objective != "classification":
        raise ConfigError(f"{run}: it was trained with objective = {config.objective}; name a run with objective = classification")
    advice = 'name UTF-8 text files, or .jsonl files with lines like {"text": "Once"} (see --field)'
    texts = [
        (path, line, text)
        for path in options.files
        for line, text in read_texts(path, str(path), options.field, advice, by_line=options.lines)
    ]
    with opened_cleaning(saved.path, saved.record.data.cleaning, options.source) as cleaned:
        texts = [(path, line, cleaned(text)) for path, line, text in texts]
    with opened_model(saved, config, options.checkpoint, trust_code=options.trust_code, alone="classify") as (model, group, _):
        labels = classified(saved, model, config, group.device, [text for _, _, text in texts], options.batch)
        for (path, line, _), found in zip(texts, labels, strict=True):
            place = {"file": str(path)} | ({} if line is None else {"line": line})
            label = max(found, key=lambda name: found[name])
            print(json.dumps(place | {"label": label, "probabilities": found}, ensure_ascii=False), flush=True)

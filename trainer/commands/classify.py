from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.errors import ConfigError
from common.files import UnusableFileError, parse_json, read_input
from common.settings.model import Place
from common.untrusted import MAX_PROMPTS_BYTES
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
    batch: int = Field(16, ge=1, le=65536, description="Number of texts that are classified together.")


@dataclass(frozen=True)
class _Text:
    file: Path
    line: int | None  # from 1; None if the file is one text
    text: str


def run(options: ClassifyOptions) -> None:
    from trainer.commands.saved_model import opened_model
    from trainer.finetuning.classification import TextClassifier
    from trainer.finetuning.task import saved_task
    from trainer.machine.determinism import settings_here
    from trainer.runs.saved_run import SavedRun

    run, saved = options.run, SavedRun(options.run)
    config = settings_here(saved.config)
    if config.objective != "classification":
        raise ConfigError(f"{run}: it was trained with objective = {config.objective}; name a run with objective = classification")
    texts = [text for path in options.files for text in _texts_of(path, options)]
    with opened_model(saved, config, options.checkpoint, trust_code=options.trust_code, alone="classify") as (model, group, _):
        classifier = TextClassifier(run, model, config, group.device, saved_task(run, config).files)
        for first in range(0, len(texts), options.batch):
            some = texts[first : first + options.batch]
            for text, found in zip(some, classifier.probabilities([one.text for one in some]), strict=True):
                place = {"file": str(text.file)} | ({} if text.line is None else {"line": text.line})
                label = max(found, key=lambda name: found[name])
                print(json.dumps(place | {"label": label, "probabilities": found}, ensure_ascii=False), flush=True)


def _texts_of(path: Path, options: ClassifyOptions) -> Iterator[_Text]:
    try:
        content = read_input(path, MAX_PROMPTS_BYTES).decode("utf-8-sig")
    except (OSError, UnusableFileError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read ({reason}); name UTF-8 text files or .jsonl files") from None
    is_json = path.suffix == ".jsonl"
    if not is_json and not options.lines:
        yield _Text(path, None, content)
        return
    for number, line in enumerate(content.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = parse_json(line.encode())[options.field] if is_json else line
            if not isinstance(text, str):
                raise TypeError("it is not a text")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: no object with a text in the field {options.field!r} ({error}); see --field"
            ) from None
        yield _Text(path, number, text)

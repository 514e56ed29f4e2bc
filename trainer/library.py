"""The names of `import trainer`, for programs and notebooks. They keep their meaning within a major version.

Settings are those of the commands, as keywords: `model={"layers": 4}`, or `**{"model.layers": 4}`. Errors are those of the commands
(`common.errors`). Everything happens in this process, on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import Dataset

from common.errors import ConfigError
from common.settings.dotted import flatten
from common.settings.load import load_settings
from common.settings.messages import explain
from common.settings.model import SettingsT
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows as StoredRows
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.commands.export import ExportOptions
from trainer.commands.export import run as run_export
from trainer.commands.saved_model import opened_text_model
from trainer.config import TrainConfig
from trainer.inference.sampling import Sampling
from trainer.interop.generation import advised_sampling
from trainer.interop.import_model import import_model as import_directory
from trainer.report.write import REPORT
from trainer.runs.layout import METRICS
from trainer.runs.metrics_file import read_events
from trainer.runs.record import NEVER_TRAINED, Record
from trainer.runs.saved_run import SavedRun

__all__ = ["Model", "Rows", "Run", "export", "import_model", "open_rows", "open_run", "prepare", "train"]


def prepare(sources: str | Path | Sequence[str | Path], output: str | Path, **settings: Any) -> Path:
    """Prepare text as `trainer prepare` does, and return the folder of the data."""
    from data_pipeline.prepare import prepare as prepare_data  # noqa: PLC0415 - takes a second, and reading rows does not need it

    named = [sources] if isinstance(sources, str | Path) else list(sources)
    config = _settings(PrepareConfig, {"sources": named, "output": output} | settings)
    prepare_data(config)
    return config.output


def train(data: str | Path, run: str | Path, **settings: Any) -> Run:
    """Train as `trainer train` does, or continue the run that is there."""
    from trainer.loop import train as train_run  # noqa: PLC0415 - the same

    config = _settings(TrainConfig, {"data": data, "run": run} | settings)
    train_run(config)
    return open_run(config.run)


def open_run(path: str | Path) -> Run:
    """CheckpointError: there is no run."""
    run = Run(Path(path))
    assert run.record
    return run


def open_rows(data: str | Path, split: str = "train") -> Rows:
    """Return the rows of prepared data. PreparedDataError: there are none."""
    if split not in SPLITS:
        raise ConfigError(f"split = {split!r}: the rows have the splits {', '.join(SPLITS)}")
    return Rows(Path(data), split)


def import_model(directory: str | Path, output: str | Path) -> Run:
    """Make a run of a published model, as `trainer import` does."""
    import_directory(Path(directory), Path(output))
    return open_run(output)


def export(run: str | Path | Run, output: str | Path, **options: Any) -> Path:
    """Write the model for other programs, as `trainer export` does."""
    path = run.path if isinstance(run, Run) else Path(run)
    try:
        chosen = ExportOptions(run=path, output=Path(output), **options)
    except ValidationError as error:
        raise ConfigError(explain(ExportOptions, error)) from None
    run_export(chosen)
    return Path(output)


class Run:
    """A run on the disk, which may still be training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = SavedRun(path)

    @property
    def record(self) -> Record:
        return self._saved.record

    @property
    def config(self) -> TrainConfig:
        return self._saved.config

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the saved states."""
        return self._saved.steps

    @property
    def report(self) -> Path:
        """The page `report.html`."""
        return self.path / REPORT

    def metrics(self, event: str = "train") -> list[dict[str, Any]]:
        """Return the rows of a table: the events of one kind in `metrics.jsonl`, such as `train`, `eval` and `save`."""
        if self.record.status in NEVER_TRAINED:
            return []
        return [found.to_json() for found in read_events(self.path / METRICS) if found.name == event]

    @property
    def samples(self) -> list[str]:
        """The texts that were written at the evaluations, with their prompts."""
        return [one["text"] for one in self.metrics("sample")]

    def load_model(self, which: str | int = "latest", *, trust_code: bool = False) -> Model:
        """`which` is `latest`, `best` or a step."""
        return Model(self.path, str(which), trust_code=trust_code)


class Model:
    """The model of a checkpoint, on the device of its run if this machine has it. `with` or `close` frees it."""

    def __init__(self, run: Path, which: str = "latest", *, trust_code: bool = False) -> None:
        self._stack = ExitStack()
        self._advice = advised_sampling(run).model_dump()
        self._text_model = self._stack.enter_context(opened_text_model(run, which, trust_code=trust_code))

    @property
    def module(self) -> nn.Module:
        return self._text_model.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text_model.tokenizer

    def generate(self, prompt: str, **sampling: Any) -> str:
        """Return the continuation of a prompt. `sampling` has the options of `trainer generate`, such as `max_tokens`."""
        return self.generate_all([prompt], **sampling)[0]

    def generate_all(self, prompts: Sequence[str], **sampling: Any) -> list[str]:
        """Continue several prompts together. The texts are those of each prompt alone, up to the noise of their places."""
        return [one.text for one in self._text_model.complete(prompts, self._sampling(sampling))]

    def stream(self, prompt: str, **sampling: Any) -> Iterator[str]:
        """Yield the continuation of a prompt in pieces."""
        return self._text_model.stream(prompt, self._sampling(sampling))

    def _sampling(self, given: Mapping[str, Any]) -> Sampling:
        return Sampling(**self._advice | dict(given))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rows(Dataset[dict[str, Tensor]]):
    """The packed rows of one split, for a `DataLoader` with `collate_fn=Rows.collate`.

    A row has `tokens`, (L,) int64; `segments`, (L,) int32: the piece of a document of each token, -1 on padding; `mask`, (L,) bool:
    whether a model that has seen the tokens before it in its piece is to predict it; and `lengths`, (M,) int64, of the M pieces.
    """

    def __init__(self, data: Path, split: str = "train") -> None:
        self.data, self.split = data, split
        self.manifest: Manifest = read_manifest(data)
        self._rows = StoredRows(data, self.manifest, split)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.data / "tokenizer")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        batch = self._rows.read(np.array([number]))
        segments_L = batch.segments_BL[0]
        mask_L = np.zeros(len(segments_L), np.bool_)
        mask_L[1:] = (segments_L[1:] >= 0) & (segments_L[1:] == segments_L[:-1])
        if batch.has_loss_BL is not None:
            mask_L &= batch.has_loss_BL[0]
        lengths_M = np.bincount(segments_L[segments_L >= 0])
        found = {"tokens": batch.tokens_BL[0].astype(np.int64), "segments": segments_L, "mask": mask_L, "lengths": lengths_M}
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()}

    def document_ids(self, number: int) -> list[int]:
        """Return the id of the document of each piece of a row."""
        return [int(one) for one in self._rows.document_ids(number)]

    @staticmethod
    def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return (B, L) tensors; `lengths` of all pieces, one row after the other, (M,); and `pieces`, (B,), their numbers."""
        stacked = {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "segments", "mask")}
        pieces_B = torch.tensor([len(row["lengths"]) for row in rows])
        return stacked | {"lengths": torch.cat([row["lengths"] for row in rows]), "pieces": pieces_B}


def _settings(model: type[SettingsT], settings: Mapping[str, Any]) -> SettingsT:
    """Return what a command line with these settings gives."""
    words = []
    for name, value in flatten(settings).items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *map(_word, values)]
    return load_settings(model, words, help_parser(model, "", ""), {})


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

"""The names of `import trainer`, for programs and notebooks. They keep their meaning within a major version.

Settings are those of the commands, as keywords: `model={"layers": 4}`, or `**{"model.layers": 4}`. Errors are those of the commands
(`common.errors`). Everything happens in this process, on one device. Threads, random numbers and logging of the process are as
before when a call returns.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import Dataset

from common.errors import ConfigError, StorageError
from common.files import UnusableFileError
from common.settings.command import check_targets
from common.settings.load import load_values
from common.settings.messages import explain, nearest
from common.settings.model import OptionsT, SettingsT
from common.storage_errors import explain_file_error
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows as StoredRows
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.commands.export import ExportOptions
from trainer.commands.export import export as export_model
from trainer.commands.import_model import ImportOptions
from trainer.commands.saved_model import opened_text_model
from trainer.config import TrainConfig
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel
from trainer.interop.generation import advised_sampling
from trainer.interop.import_model import import_model as import_directory
from trainer.machine.determinism import configure_determinism, kept_process_settings, settings_here
from trainer.report.write import REPORT
from trainer.runs.events import EVENTS
from trainer.runs.layout import METRICS
from trainer.runs.metrics_file import read_events
from trainer.runs.record import NEVER_TRAINED, Record
from trainer.runs.saved_run import SavedRun

__all__ = ["Model", "Rows", "Run", "export", "import_model", "open_rows", "open_run", "prepare", "train"]

AnyPath = str | os.PathLike[str]
_log = logging.getLogger(__name__)
_training = threading.Lock()


def prepare(sources: AnyPath | Sequence[AnyPath], output: AnyPath, **settings: Any) -> Path:
    """Prepare text as `trainer prepare` does, and return the folder of the data. Data that is already prepared is used again.

    Ctrl-C raises KeyboardInterrupt. The same call then goes on with the finished work.
    """
    from data_pipeline.prepare import prepare as prepare_data  # noqa: PLC0415 - takes a second, and reading rows does not need it

    config = _settings(PrepareConfig, {"sources": sources, "output": output} | settings)
    with _errors_of_commands():
        prepare_data(config)
    return config.output


def train(data: AnyPath | None, run: AnyPath, **settings: Any) -> Run:
    """Train as `trainer train` does, or continue the run that is there. `data` None: a run continues with its data and settings.

    Ctrl-C and SIGTERM save the state and raise StoppedBySignal, if this is the main thread. The same call then continues the run.
    A process trains one run at a time.
    """
    from trainer.loop import train as train_run  # noqa: PLC0415 - the same

    given = {"run": run} if data is None else {"data": data, "run": run}
    config = _settings(TrainConfig, given | settings)
    if not _training.acquire(blocking=False):
        raise ConfigError("this process trains another run; wait for its end, or train this one in another process")
    try:
        with _errors_of_commands(), kept_process_settings(), _kept_generators(), _kept_logging():
            train_run(config)
    finally:
        _training.release()
    return open_run(config.run)


def open_run(path: AnyPath) -> Run:
    """CheckpointError: there is no run."""
    run = Run(_folder("path", path))
    assert run.record
    return run


def open_rows(data: AnyPath, split: str = "train") -> Rows:
    """Return the rows of prepared data; `split` is `train` or `val`. PreparedDataError: there are none."""
    if split not in SPLITS:
        raise ConfigError(f"split = {split!r}: the rows have the splits {', '.join(SPLITS)}")
    with _errors_of_commands():
        return Rows(_folder("data", data), split)


def import_model(directory: AnyPath, output: AnyPath) -> Run:
    """Make a run of a published model, as `trainer import` does. `directory` may also be the name of a model of the Hub."""
    options = _options(ImportOptions, {"directory": directory, "output": output})
    with _errors_of_commands():
        found = import_directory(options.directory, options.output)
    if found.template_refused is not None:
        _log.warning("%s: the chat template is left out: %s", options.directory, found.template_refused)
    return open_run(output)


def export(run: AnyPath, output: AnyPath, *, checkpoint: str | int = "latest", **options: Any) -> Path:
    """Write the model for other programs, as `trainer export` does, and return the folder. `run` may be a `Run`."""
    chosen = _options(ExportOptions, {"run": run, "output": output, "checkpoint": str(checkpoint)} | options)
    with _errors_of_commands():
        export_model(chosen)
    return chosen.output


class Run:
    """The folder of a run. Every function that takes a path accepts it.

    `metrics`, `samples` and `checkpoints` are read from the folder at each access, because the run may still be training.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._saved = SavedRun(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def record(self) -> Record:
        """What the run was when it was opened: `status`, `identity`, `environment` and more."""
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
        """Return the rows of a table: the events of one kind in `metrics.jsonl`, such as `train`, `eval` and `save`.

        A run that was imported, or has not trained yet, has none.
        """
        if event not in EVENTS:
            raise ConfigError(f"{event!r} is not an event of a run{nearest(str(event), list(EVENTS))}; use {', '.join(EVENTS)}")
        if self.record.status in NEVER_TRAINED:
            return []
        with _errors_of_commands():
            return [found.to_json() for found in read_events(self.path / METRICS) if found.name == event]

    @property
    def samples(self) -> list[str]:
        """The texts that were written at the evaluations, with their prompts."""
        return [one["text"] for one in self.metrics("sample")]

    def load_model(self, which: str | int = "latest", *, trust_code: bool = False) -> Model:
        """`which` is `latest`, `best` or a step. `trust_code`: execute the extension of the run."""
        return Model(self.path, str(which), trust_code=trust_code)


class Model:
    """The model of a checkpoint, on the device of its run if this machine has it. `with` or `close` frees it."""

    def __init__(self, run: Path, which: str = "latest", *, trust_code: bool = False) -> None:
        self._run, self._stack = run, ExitStack()
        self._opened: TextModel | None = None
        with _errors_of_commands(), kept_process_settings(), _kept_generators():
            self._config = settings_here(SavedRun(run).config)
            self._advice = advised_sampling(run).model_dump()
            self._opened = self._stack.enter_context(opened_text_model(run, which, trust_code=trust_code))

    def __repr__(self) -> str:
        return f"Model({str(self._run)!r})"

    @property
    def _text_model(self) -> TextModel:
        if self._opened is None:
            raise ConfigError(f"the model of {self._run} is closed; load it again with load_model")
        return self._opened

    @property
    def module(self) -> nn.Module:
        return self._text_model.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text_model.tokenizer

    def generate(self, prompt: str, **sampling: Any) -> str:
        """Return the continuation of a prompt. `sampling` has the options of `trainer generate`, such as `max_tokens`.

        Options that are not given are those that the model's publisher advises, or the defaults of the command. The same seed gives
        the same text; it is 0 if it is not given.
        """
        return self.generate_all([prompt], **sampling)[0]

    def generate_all(self, prompts: Sequence[str], **sampling: Any) -> list[str]:
        """Continue several prompts together. The texts are those of each prompt alone, up to the noise of their places."""
        model, chosen = self._text_model, self._sampling(sampling)
        if isinstance(prompts, str):
            raise ConfigError(f"prompts = {prompts!r}: give a list of texts")
        for prompt in prompts:
            _check_prompt(prompt)
        with self._settings():
            return [one.text for one in model.complete(prompts, chosen)]

    def stream(self, prompt: str, **sampling: Any) -> Iterator[str]:
        """Return an iterator of the pieces of the continuation. A character that needs several tokens is in one piece."""
        _check_prompt(prompt)
        return self._pieces(self._text_model.stream(prompt, self._sampling(sampling)))

    def _pieces(self, pieces: Iterator[str]) -> Iterator[str]:
        while True:
            with self._settings():  # not while the caller works
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    @contextmanager
    def _settings(self) -> Iterator[None]:
        with kept_process_settings():
            configure_determinism(self._config)
            yield

    def _sampling(self, given: Mapping[str, Any]) -> Sampling:
        stop = given.get("stop")
        texts = {"stop": (stop,) if isinstance(stop, str) else tuple(stop)} if isinstance(stop, str | list) else {}
        return Sampling(**self._advice | dict(given) | texts)

    def close(self) -> None:
        self._opened = None
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
        self.data, self.split = data.absolute(), split
        self.manifest: Manifest = read_manifest(data)
        self._rows = StoredRows(self.data, self.manifest, split)

    def __repr__(self) -> str:
        return f"Rows({str(self.data)!r}, {self.split!r})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.data / "tokenizer")

    def __len__(self) -> int:
        return len(self._rows)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rows": StoredRows(self.data, self.manifest, self.split)}  # an open shard belongs to one process

    def _place(self, number: int) -> int:
        place = operator.index(number)
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        return place % len(self)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return a row. A negative number counts from the end."""
        with _errors_of_commands():
            batch = self._rows.read(np.array([self._place(number)]))
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
        return [int(one) for one in self._rows.document_ids(self._place(number))]

    @staticmethod
    def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return (B, L) tensors; `lengths` of all pieces, one row after the other, (M,); and `pieces`, (B,), their numbers."""
        stacked = {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "segments", "mask")}
        pieces_B = torch.tensor([len(row["lengths"]) for row in rows])
        return stacked | {"lengths": torch.cat([row["lengths"] for row in rows]), "pieces": pieces_B}


def _settings(model: type[SettingsT], settings: Mapping[str, Any]) -> SettingsT:
    with _errors_of_commands():
        config = load_values(model, settings)
    check_targets(config)
    return config


def _options(model: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    try:
        options = model(**{name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()})
    except ValidationError as error:
        raise ConfigError(explain(model, error)) from None
    check_targets(options)
    return options


def _folder(name: str, path: AnyPath) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{name} = {path!r}: give a path")
    return Path(path)


def _check_prompt(prompt: str) -> None:
    if not isinstance(prompt, str):
        raise ConfigError(f"prompt = {prompt!r}: give a text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt contains {prompt[error.start]!r}, half of a character; give valid Unicode") from None


@contextmanager
def _errors_of_commands() -> Iterator[None]:
    try:
        yield
    except (OSError, UnusableFileError) as error:
        raise StorageError(explain_file_error(error)) from error


@contextmanager
def _kept_generators() -> Iterator[None]:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng([torch.cuda.current_device()] if used else []):
        yield


@contextmanager
def _kept_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers

"""Trains the models that score the quality of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.files import digest_bytes, write_atomic
from data_pipeline.config import PrepareConfig, QualitySettings
from data_pipeline.dataset.layout import TOKENIZER
from data_pipeline.execution.tasks import commit_result
from data_pipeline.filters.html import PageReader
from data_pipeline.filters.judge import JudgedDocument, judge_batch
from data_pipeline.quality.classifier import Classifier, train_classifier
from data_pipeline.quality.perplexity import ReferenceModel, train_reference
from data_pipeline.sources.inputs import InputFile, Part, find_inputs
from data_pipeline.sources.readers import read_part
from data_pipeline.stages.job import Job
from data_pipeline.stages.split import SplitResult, read_kept, texts_of
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

__all__ = ["MODELS", "ClassifierResult", "Models", "load_models", "train_quality"]


def train_quality(job: Job, split: Sequence[SplitResult]) -> ClassifierResult | None:
    """Train the quality models that the settings ask for. Return the classifier's result, None if there is no classifier."""
    quality = job.config.quality
    tokenizer, models = job.work / TOKENIZER, job.work / MODELS
    if quality.trusted is not None:
        numbers = [number for number, partition in enumerate(job.partitions) if partition.source == quality.trusted]
        documents = tuple((job.place("text", number), job.place("split", number)) for number in numbers)
        reference = ReferenceTask(documents, tokenizer, job.config, models / "reference")
        sizes = [sum(split[number].bytes["train"] for number in numbers)]
        job.run("reference", train_reference_model, [reference], sizes, ReferenceResult)
    if not quality.good:
        return None
    good, bad = (find_examples(paths, job.config, job.work) for paths in (quality.good, quality.bad))
    classifier = ClassifierTask(good, bad, tokenizer, job.config, models / "classifier")
    size = sum(file.bytes for file in (*good, *bad))
    [result] = job.run("classifier", train_content_classifier, [classifier], [size], ClassifierResult)
    return result


def find_examples(paths: Sequence[Path], config: PrepareConfig, work: Path) -> tuple[InputFile, ...]:
    """Return the files of a class of examples. They are read like sources."""
    update = {"sources": tuple(map(str, paths)), "source": {}, "if_empty": "error"}
    return find_inputs(config.model_copy(update=update), work / "examples.json")


MODELS = "models"
_REFERENCE, _CLASSIFIER = "reference.safetensors", "classifier.safetensors"
_EXAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class ReferenceTask:
    """Train the reference model on the training documents of the trusted source."""

    documents: tuple[tuple[Path, Path], ...]
    """Text table and split table of each of its partitions."""
    tokenizer: Path
    config: PrepareConfig
    output: Path


@dataclass(frozen=True)
class ReferenceResult:
    """Number of tokens that the reference model was trained on."""

    tokens: int


def train_reference_model(task: ReferenceTask) -> ReferenceResult:
    """Write the reference model into the folder of `output`."""
    tokenizer = load_tokenizer(task.tokenizer, trial=False)

    def batches() -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        for text, split in task.documents:
            for batch in read_kept(text, split):
                encoded = tokenizer.encode_flat(texts_of(batch, "train"))
                yield encoded.ids_T, encoded.ends_D

    model = train_reference(batches(), tokenizer.vocab_size, task.config.quality)
    task.output.parent.mkdir(parents=True, exist_ok=True)
    result = ReferenceResult(int(model.singles_V[:-1].sum()))
    return commit_result(task, result, files=_write(task.output.with_name(_REFERENCE), model.to_bytes()))


@dataclass(frozen=True)
class ClassifierTask:
    """Train the classifier on the user's examples."""

    good: tuple[InputFile, ...]
    bad: tuple[InputFile, ...]
    tokenizer: Path
    config: PrepareConfig
    output: Path


@dataclass(frozen=True)
class ClassifierResult:
    """Counts of the classifier on held-out examples."""

    good: int
    good_kept: int
    bad: int
    bad_dropped: int
    accuracy: float


def train_content_classifier(task: ClassifierTask) -> ClassifierResult:
    """Write the classifier into the folder of `output`."""
    tokenizer = load_tokenizer(task.tokenizer, trial=False)
    good, bad = (_encoded_examples(files, tokenizer, task.config) for files in (task.good, task.bad))
    classifier, held_out = train_classifier(good, bad, task.config.quality.classifier_bits)
    task.output.parent.mkdir(parents=True, exist_ok=True)
    result = ClassifierResult(**asdict(held_out), accuracy=round(held_out.accuracy, 6))
    return commit_result(task, result, files=_write(task.output.with_name(_CLASSIFIER), classifier.to_bytes()))


def _write(path: Path, content: bytes) -> dict[Path, str]:
    write_atomic(path, content, durable=False)
    return {path: digest_bytes(content)}


def _encoded_examples(files: Sequence[InputFile], tokenizer: Tokenizer, config: PrepareConfig) -> Iterator[NDArray[np.int32]]:
    items = (item for file in files for item in read_part(Part(file, 0, file.bytes), config))
    with PageReader(config.limits) as pages:
        while batch := list(islice(items, _EXAMPLES_AT_ONCE)):
            judged = judge_batch(batch, config, pages)
            texts = [item.document.text for item in judged.items if isinstance(item, JudgedDocument)]
            yield from tokenizer.encode_arrays(texts)


@dataclass(frozen=True)
class Models:
    """The models that score documents; None if the settings do not ask for one."""

    reference: ReferenceModel | None
    classifier: Classifier | None


def load_models(folder: Path, settings: QualitySettings) -> Models:
    """Load the models that the settings ask for from a folder."""
    return Models(
        ReferenceModel.from_bytes((folder / _REFERENCE).read_bytes()) if settings.trusted is not None else None,
        Classifier.from_bytes((folder / _CLASSIFIER).read_bytes()) if settings.good else None,
    )

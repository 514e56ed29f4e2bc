from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, PreparedDataError
from common.files import digest_bytes, read_input, write_atomic
from data_pipeline.config import PrepareConfig, QualityConfig
from data_pipeline.dataset.layout import MANIFEST, REFERENCE, TOKENIZER
from data_pipeline.dataset.manifest import MAX_REFERENCE_BYTES, check_digests, read_manifest
from data_pipeline.execution.tasks import commit_result
from data_pipeline.filters.html import PageReader
from data_pipeline.filters.judge import JudgedDocument, judge_batch
from data_pipeline.quality.arpa import ArpaModel, is_arpa, read_arpa
from data_pipeline.quality.classifier import Classifier, HeldOut, train_classifier
from data_pipeline.quality.perplexity import ReferenceModel, train_reference
from data_pipeline.sources.inputs import InputFile, Part, find_inputs
from data_pipeline.sources.readers import read_part
from data_pipeline.stages.job import Job, PartitionTask
from data_pipeline.stages.split import SplitResult, read_kept, texts_of
from data_pipeline.tokenizer import Encoded, Tokenizer, load_tokenizer


def train_quality(job: Job, split: Sequence[SplitResult]) -> HeldOut | None:
    quality = job.config.quality
    tokenizer, models = job.work / TOKENIZER, job.work / MODELS
    if quality.measures_perplexity:
        trusted = [task for task in job.tasks(PartitionTask) if task.source == quality.trusted]
        documents = tuple((task.place("text"), task.place("split")) for task in trusted)
        kind = None if quality.reference is None else kind_of_reference(quality.reference)
        files = find_examples((quality.reference,), job.config, job.work) if quality.reference and kind == "text" else ()
        reference = ReferenceTask(documents, files, kind, tokenizer, job.config, models / "reference")
        size = sum(split[task.number].bytes["train"] for task in trusted) + sum(file.bytes for file in files)
        job.run("reference", make_reference, [reference], [size], dict)
    if not quality.good:
        return None
    good, bad = (find_examples(paths, job.config, job.work) for paths in (quality.good, quality.bad))
    classifier = ClassifierTask(good, bad, tokenizer, job.config, models / "classifier")
    size = sum(file.bytes for file in (*good, *bad))
    [result] = job.run("classifier", train_content_classifier, [classifier], [size], HeldOut)
    return result


def find_examples(paths: Sequence[Path], config: PrepareConfig, work: Path) -> tuple[InputFile, ...]:
    update = {"sources": tuple(map(str, paths)), "source": {}, "if_empty": "error"}
    return find_inputs(config.model_copy(update=update), work / "examples.json")


MODELS = "models"
_REFERENCE, _CLASSIFIER = "reference.safetensors", "classifier.safetensors"
_ARPA, _FOREIGN = "arpa.safetensors", "foreign.safetensors"
_EXAMPLES_AT_ONCE = 256


ReferenceKind = Literal["text", "arpa", "prepared"]


def kind_of_reference(path: Path) -> ReferenceKind:
    if path.is_dir() and (path / "record.json").is_file():
        raise ConfigError(
            f"quality.reference = {path} is the folder of a training run, which only the trainer can read; let the run write text "
            "with `trainer generate`, and name the file of that text"
        )
    try:
        if path.is_dir() and (path / MANIFEST).is_file():
            if REFERENCE not in read_manifest(path).files:
                raise ConfigError(
                    f"quality.reference = {path} is prepared data without a reference model; prepare it with quality.trusted, or "
                    "with a text as quality.reference; or name the text that it was made from"
                )
            return "prepared"
        return "arpa" if path.is_file() and is_arpa(path) else "text"
    except OSError as error:
        raise ConfigError(f"quality.reference = {path}: cannot be read ({error.strerror}); check the path") from None


def files_of_reference(path: Path) -> list[Path]:
    """Return the files of prepared data that a preparation with this reference reads; none for other references."""
    if kind_of_reference(path) != "prepared":
        return []
    return [path / name for name in sorted(_digests_of_prepared(path))]


def _digests_of_prepared(path: Path) -> dict[str, str]:
    files = read_manifest(path).files
    return {name: digest for name, digest in files.items() if name == REFERENCE or name.startswith(f"{TOKENIZER}/")}


@dataclass(frozen=True)
class ReferenceTask:
    documents: tuple[tuple[Path, Path], ...]  # text table and split table of each partition of the trusted source
    files: tuple[InputFile, ...]  # the files of the text that `quality.reference` names
    kind: ReferenceKind | None  # what `quality.reference` names; None if it is not set
    tokenizer: Path
    config: PrepareConfig
    output: Path


def make_reference(task: ReferenceTask) -> dict[str, int]:
    """Return the number of tokens that trained the model, as `tokens`; 0 if it was copied."""
    task.output.parent.mkdir(parents=True, exist_ok=True)
    path = task.config.quality.reference
    if path is not None and task.kind == "arpa":
        return commit_result(task, {"tokens": 0}, _write(task.output.with_name(_ARPA), read_arpa(path).to_bytes()))
    if path is not None and task.kind == "prepared":
        digests = _digests_of_prepared(path)
        check_digests(path, digests)
        written: dict[Path, str] = {}
        for name in digests:  # copied, because that data may be replaced during this preparation
            target = task.output.with_name(_FOREIGN) if name == REFERENCE else task.output.parent / name
            target.parent.mkdir(exist_ok=True)
            written |= _write(target, read_input(path / name, MAX_REFERENCE_BYTES, below=path))
        return commit_result(task, {"tokens": 0}, written)
    tokenizer = load_tokenizer(task.tokenizer, trial=False)

    def batches() -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        for text, split in task.documents:
            for batch in read_kept(text, split):
                encoded = tokenizer.encode_flat(texts_of(batch, "train"))
                yield encoded.ids_T, encoded.ends_D
        for array in _encoded_examples(task.files, tokenizer, task.config):
            yield array, np.array([len(array)])

    model = train_reference(batches(), tokenizer.vocab_size, task.config.quality)
    return commit_result(
        task, {"tokens": int(model.singles_V[:-1].sum())}, _write(task.output.with_name(_REFERENCE), model.to_bytes())
    )


def trained_reference(job: Job) -> Path | None:
    path = job.work / MODELS / _REFERENCE
    return path if job.config.quality.measures_perplexity and path.is_file() else None


@dataclass(frozen=True)
class ClassifierTask:
    good: tuple[InputFile, ...]
    bad: tuple[InputFile, ...]
    tokenizer: Path
    config: PrepareConfig
    output: Path


def train_content_classifier(task: ClassifierTask) -> HeldOut:
    tokenizer = load_tokenizer(task.tokenizer, trial=False)
    good, bad = (_encoded_examples(files, tokenizer, task.config) for files in (task.good, task.bad))
    classifier, held_out = train_classifier(good, bad, task.config.quality.classifier_bits)
    task.output.parent.mkdir(parents=True, exist_ok=True)
    return commit_result(task, held_out, _write(task.output.with_name(_CLASSIFIER), classifier.to_bytes()))


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


Score = Callable[[Sequence[str], Encoded], NDArray[np.uint16]]  # each text is given with its ids by this preparation's tokenizer


def load_models(folder: Path, settings: QualityConfig) -> tuple[Score | None, Classifier | None]:
    """Return the reference model and the classifier; None if the settings do not ask for it."""
    reference = _load_reference(folder) if settings.measures_perplexity else None
    return reference, Classifier.from_bytes((folder / _CLASSIFIER).read_bytes()) if settings.good else None


def _load_reference(folder: Path) -> Score:
    if (folder / _ARPA).is_file():
        of_words = ArpaModel.from_bytes((folder / _ARPA).read_bytes())
        return lambda texts, _: of_words.score(texts)
    if not (folder / _FOREIGN).is_file():
        trained = ReferenceModel.from_bytes((folder / _REFERENCE).read_bytes())
        return lambda _, encoded: trained.score(encoded.ids_T, encoded.ends_D)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    model = ReferenceModel.from_bytes((folder / _FOREIGN).read_bytes())
    if len(model.singles_V) != tokenizer.vocab_size + 1:
        raise PreparedDataError("quality.reference: the model was not made with the tokenizer beside it; prepare that data again")

    def score(texts: Sequence[str], _: Encoded) -> NDArray[np.uint16]:
        own = tokenizer.encode_flat(texts)
        return model.score(own.ids_T, own.ends_D)

    return score

"""The tasks of every stage: which files each of them reads, and where it leaves its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from data_pipeline.balance import repeats_of_groups
from data_pipeline.config import PackingSettings, PrepareConfig, TokenizerSettings
from data_pipeline.dataset.layout import CHOSEN, TOKENIZER, TOKENS
from data_pipeline.dataset.shards import token_type
from data_pipeline.dataset.splits import SPLITS, Split
from data_pipeline.dedup.duplicates import STAGES as DUPLICATES
from data_pipeline.dedup.duplicates import Duplicates, PartitionKeys, RunStage, find_duplicates
from data_pipeline.execution.tasks import add_counts
from data_pipeline.quality.bounds import resolve_bounds
from data_pipeline.sources.inputs import InputFile, Partition, find_inputs
from data_pipeline.stages.packing_rows import PackResult, PackTask, pack_group
from data_pipeline.stages.reading import ReadResult, ReadTask, read_partition
from data_pipeline.stages.scoring import (
    MODELS,
    ClassifierResult,
    ClassifierTask,
    ReferenceResult,
    ReferenceTask,
    train_content_classifier,
    train_reference_model,
)
from data_pipeline.stages.selecting import Cuts, SelectResult, SelectTask, WeighResult, WeighTask, select_partition, weigh_partition
from data_pipeline.stages.splitting import SplitResult, SplitTask, split_partition, with_enough_held_out
from data_pipeline.stages.tokenizing import TokenizeResult, TokenizeTask, tokenize_partition
from data_pipeline.stages.vocabulary import SampleResult, SampleTask, TrainedTokenizer, TrainTask, sample_partition, train

__all__ = [
    "DocumentsOf",
    "Job",
    "cuts_of_sources",
    "documents_of",
    "drop_duplicates",
    "pack_all",
    "read_all",
    "select_all",
    "split_all",
    "stage_names",
    "tokenize_all",
    "train_on_sample",
    "train_quality",
]


@dataclass(frozen=True)
class Job:
    """One preparation: what is read, how, by whom, and where the stages leave their results."""

    config: PrepareConfig
    partitions: Sequence[Partition]
    work: Path
    run: RunStage

    def place(self, folder: str, number: int) -> Path:
        """Where a stage leaves what it made of a partition."""
        return self.work / folder / f"{number:06d}"


@dataclass(frozen=True)
class DocumentsOf:
    """The tokenised documents of one partition, in the work of a preparation or in prepared data."""

    source: str
    number: int
    root: Path
    tokens: Mapping[str, int]
    """Number of tokens of each split that go into rows."""
    digests: Mapping[str, str]
    """Digest of each of its tables, by folder."""

    def place(self, folder: str) -> Path:
        """The place of one of its tables."""
        return self.root / folder / f"{self.number:06d}"


def read_all(job: Job) -> list[ReadResult]:
    """Reads, cleans and judges every partition."""
    tasks = [
        ReadTask(partition, job.config, job.place("keys", number), job.place("text", number))
        for number, partition in enumerate(job.partitions)
    ]
    return job.run("read", read_partition, tasks, [partition.bytes for partition in job.partitions], ReadResult)


def drop_duplicates(job: Job, read: Sequence[ReadResult]) -> Duplicates:
    """Finds the documents that are like an earlier one, and those that share text with a benchmark."""
    keys = [PartitionKeys(number, result.source, result.kept) for number, result in enumerate(read)]
    return find_duplicates(job.run, keys, job.config.dedup, job.work)


def split_all(job: Job, read: Sequence[ReadResult], duplicates: Duplicates) -> list[SplitResult]:
    """Puts what is no duplicate on the side of training or validation."""
    places = [job.place("duplicates", number) for number in range(len(read))]
    settings = with_enough_held_out(job.config.split, duplicates.num_kept, places)
    tasks = [
        SplitTask(job.place("text", number), place, settings, job.place("split", number)) for number, place in enumerate(places)
    ]
    return job.run("split", split_partition, tasks, [result.bytes for result in read], SplitResult)


def train_on_sample(job: Job, split: Sequence[SplitResult]) -> TrainedTokenizer:
    """Draws a sample of the training text and trains the tokenizer on it, or takes the one that the user supplies."""
    settings = job.config.tokenizer
    sizes = [result.bytes["train"] for result in split]
    samples: list[SampleTask] = []
    if _is_trained(settings):
        fraction = settings.sample_bytes / max(sum(sizes), 1)
        samples = [
            SampleTask(
                job.place("text", number),
                job.place("split", number),
                fraction,
                settings.kind == "char",
                job.place("sample", number),
            )
            for number in range(len(split))
        ]
        job.run("sample", sample_partition, samples, sizes, SampleResult)
    task = TrainTask(tuple(sample.output for sample in samples), settings, job.config.augment.special_tokens, job.work / TOKENIZER)
    [tokenizer] = job.run("train", train, [task], [min(sum(sizes), settings.sample_bytes)], TrainedTokenizer)
    return tokenizer


def _is_trained(settings: TokenizerSettings) -> bool:
    return settings.path is None and settings.kind != "byte"


def stage_names(config: PrepareConfig) -> list[str]:
    """The stages that a preparation with these settings goes through, in their order."""
    return [
        "read",
        *DUPLICATES,
        "split",
        *(["sample"] if _is_trained(config.tokenizer) else []),
        "train",
        *(["reference"] if config.quality.trusted else []),
        *(["classifier"] if config.quality.good else []),
        "tokenize",
        *(["weigh"] if config.balance.by != "none" else []),
        "select",
        "pack",
    ]


def tokenize_all(job: Job, split: Sequence[SplitResult]) -> list[TokenizeResult]:
    """Encodes the documents of every partition and scores them."""
    tasks = [
        TokenizeTask(
            job.place("text", number),
            job.place("split", number),
            job.work / TOKENIZER,
            job.work / MODELS,
            job.config,
            job.place(TOKENS, number),
        )
        for number in range(len(split))
    ]
    return job.run("tokenize", tokenize_partition, tasks, [sum(result.bytes.values()) for result in split], TokenizeResult)


def train_quality(job: Job, split: Sequence[SplitResult]) -> ClassifierResult | None:
    """Trains the models by which quality is judged, where the settings ask for them; says how well the classifier does."""
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
    """The files of examples of a class, read as sources are."""
    update = {"sources": tuple(map(str, paths)), "source": {}, "if_empty": "error"}
    return find_inputs(config.model_copy(update=update), work / "examples.json")


def cuts_of_sources(job: Job, tokenized: Sequence[TokenizeResult]) -> dict[str, Cuts]:
    """What the documents of each source must reach; percentiles are those of all documents of the source."""
    cuts = {}
    for source in dict.fromkeys(partition.source for partition in job.partitions):
        settings = job.config.for_source(source).quality
        members = [result for partition, result in zip(job.partitions, tokenized, strict=True) if partition.source == source]
        bounds = resolve_bounds(add_counts(result.scores for result in members), settings)
        cuts[source] = Cuts(bounds, settings.trusted not in (None, source), bool(settings.good))
    return cuts


def select_all(job: Job, tokenized: Sequence[TokenizeResult], cuts: Mapping[str, Cuts]) -> list[SelectResult]:
    """Chooses the documents that are good enough, and balances the groups."""
    sizes = [result.tokens for result in tokenized]
    sources = [partition.source for partition in job.partitions]
    balance = job.config.balance
    repeats = None
    if balance.by != "none":
        weigh = [
            WeighTask(job.place(TOKENS, number), source, cuts[source], balance, job.place("weighed", number))
            for number, source in enumerate(sources)
        ]
        tokens = add_counts(result.tokens for result in job.run("weigh", weigh_partition, weigh, sizes, WeighResult))
        repeats = repeats_of_groups(tokens, job.config.weights, balance.max_repeats)
    tasks = [
        SelectTask(
            job.place("text", number),
            job.place(TOKENS, number),
            source,
            cuts[source],
            balance,
            repeats,
            job.config.split.seed,
            job.place(CHOSEN, number),
        )
        for number, source in enumerate(sources)
    ]
    return job.run("select", select_partition, tasks, sizes, SelectResult)


def documents_of(job: Job, tokenized: Sequence[TokenizeResult], selected: Sequence[SelectResult]) -> list[DocumentsOf]:
    """The tokenised documents of every partition."""
    return [
        DocumentsOf(partition.source, number, job.work, chosen.tokens, {TOKENS: encoded.sha256, CHOSEN: chosen.sha256})
        for number, (partition, encoded, chosen) in enumerate(zip(job.partitions, tokenized, selected, strict=True))
    ]


def pack_all(
    run: RunStage,
    row_length: int,
    packing: PackingSettings,
    tokenizer: TrainedTokenizer,
    documents: Sequence[DocumentsOf],
    work: Path,
) -> list[tuple[PackTask, PackResult]]:
    """Packs each split of each source, in groups of consecutive partitions that fill about a shard."""
    token_bytes = token_type(tokenizer.vocab_size).itemsize
    tasks, sizes = [], []
    for source, of_source in groupby(documents, key=lambda partition: partition.source):
        members = list(of_source)
        for split in SPLITS:
            for group in group_by_tokens(members, split, packing.shard_bytes // token_bytes):
                task = PackTask(
                    source,
                    tuple(partition.place(TOKENS) for partition in group),
                    tuple(partition.place(CHOSEN) for partition in group),
                    split,
                    row_length,
                    token_bytes,
                    tokenizer.pad_id,
                    packing,
                    work / "shards" / f"{source}-{split}-{group[0].number:06d}",
                )
                tasks.append(task)
                sizes.append(token_bytes * sum(partition.tokens[split] for partition in group))
    return list(zip(tasks, run("pack", pack_group, tasks, sizes, PackResult), strict=True))


def group_by_tokens(partitions: Sequence[DocumentsOf], split: Split, group_tokens: int) -> Iterator[list[DocumentsOf]]:
    """Consecutive partitions that together reach `group_tokens` of a split; what is left over makes a last, smaller group."""
    group: list[DocumentsOf] = []
    in_group = 0
    for partition in partitions:
        group.append(partition)
        in_group += partition.tokens[split]
        if in_group >= group_tokens:
            yield group
            group, in_group = [], 0
    if in_group:
        yield group

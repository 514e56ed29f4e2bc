"""The preparation, from top to bottom: find the input, read, train the tokenizer, tokenize, pack, publish.

Each stage is a list of tasks cut by input bytes. Its results are committed one by one, so that a preparation that was killed goes
on where it was; and they are taken in the order of the tasks, so that the number of workers changes nothing but the time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from data_pipeline.checks import check_positions_exist, check_rejected, check_split
from data_pipeline.config import PrepareConfig
from data_pipeline.engine import Engine, available_cores, open_engine, stop_on_signals
from data_pipeline.files import canonical_json, digest_bytes, digest_file
from data_pipeline.manifest import Manifest, ShardEntry
from data_pipeline.partitions import Partition, cut_into_partitions
from data_pipeline.progress import stage_progress
from data_pipeline.publish import (
    INPUTS,
    REJECTS,
    REPORT,
    TOKENIZER,
    clear_work,
    exclusive,
    find_finished,
    json_lines,
    publish,
    work_directory,
)
from data_pipeline.report import collect_rejects, make_report
from data_pipeline.shards import token_type
from data_pipeline.sources.inputs import InputFile, find_inputs, remember_digests
from data_pipeline.split import SPLITS, Split
from data_pipeline.stages import (
    PackResult,
    PackTask,
    ReadResult,
    ReadTask,
    SampleResult,
    SampleTask,
    Task,
    TokenizeResult,
    TokenizeTask,
    TrainedTokenizer,
    TrainTask,
    pack_group,
    read_partition,
    run_stage,
    sample_partition,
    tokenize_partition,
    train,
)

__all__ = ["prepare"]

logger = logging.getLogger(__name__)

PIPELINE_VERSION = 1
"""Raised whenever the same settings and input would give other bytes, so that what an older version left is not taken for done."""

TaskT = TypeVar("TaskT", bound=Task)
ResultT = TypeVar("ResultT")


def prepare(config: PrepareConfig) -> Manifest:
    """Prepares the sources under `config.output` and returns the manifest; does nothing when that is already so.

    Raises:
        SourceError: the input is missing or malformed, or leaves too little text.
        ConfigError: the settings do not fit the input.
        StoppedBySignal: SIGTERM came; the next run goes on from here.
    """
    output = config.output
    with stop_on_signals(), exclusive(output):
        inputs = find_inputs(config, output / INPUTS)
        check_positions_exist(inputs, config)
        remember_digests(inputs, output / INPUTS)
        fingerprint = digest_bytes(
            canonical_json({"version": PIPELINE_VERSION, "config": config.portable, "inputs": [file.identity for file in inputs]})
        )
        finished = find_finished(output, fingerprint, with_rejects=config.keep_rejects)
        if finished is not None:
            clear_work(output)
            logger.info("%s already holds this data, with these settings and inputs: nothing to do", output)
            return finished
        work = work_directory(output, fingerprint)
        partitions = cut_into_partitions(inputs, config.partition_bytes)
        with open_engine(min(config.workers or available_cores(), len(partitions))) as engine:
            read = read_all(engine, partitions, config, work)
            check_rejected(partitions, read, config)
            check_split(read, config)
            tokenizer = train_on_sample(engine, read, config, work)
            tokenized = tokenize_all(engine, read, config, work)
            packed = pack_all(engine, read, tokenized, tokenizer, config, work)
        return publish_all(inputs, partitions, fingerprint, read, tokenizer, tokenized, packed, config, work)


def read_all(engine: Engine, partitions: Sequence[Partition], config: PrepareConfig, work: Path) -> list[ReadResult]:
    """Reads, cleans, judges and splits every partition."""
    tasks = [ReadTask(partition, config, work / "text" / f"{partition.number:06d}") for partition in partitions]
    sizes = [partition.bytes for partition in partitions]
    return run("read", engine, read_partition, tasks, sizes, ReadResult)


def train_on_sample(engine: Engine, read: Sequence[ReadResult], config: PrepareConfig, work: Path) -> TrainedTokenizer:
    """Draws a sample of the training text and trains the tokenizer on it."""
    settings = config.tokenizer
    sizes = [result.bytes["train"] for result in read]
    fraction = settings.sample_bytes / max(sum(sizes), 1)
    samples: list[SampleTask] = []
    if settings.kind != "byte":
        samples = [
            SampleTask(work / "text" / f"{number:06d}", fraction, settings.kind == "char", work / "sample" / f"{number:06d}")
            for number in range(len(read))
        ]
        run("sample", engine, sample_partition, samples, sizes, SampleResult)
    task = TrainTask(tuple(sample.output for sample in samples), settings, work / TOKENIZER)
    [tokenizer] = run("train", engine, train, [task], [min(sum(sizes), settings.sample_bytes)], TrainedTokenizer)
    return tokenizer


def tokenize_all(engine: Engine, read: Sequence[ReadResult], config: PrepareConfig, work: Path) -> list[TokenizeResult]:
    """Encodes the documents of every partition."""
    tasks = [
        TokenizeTask(work / "text" / f"{number:06d}", work / TOKENIZER, config.tokenizer, work / "tokens" / f"{number:06d}")
        for number in range(len(read))
    ]
    return run("tokenize", engine, tokenize_partition, tasks, [sum(result.bytes.values()) for result in read], TokenizeResult)


def pack_all(
    engine: Engine,
    read: Sequence[ReadResult],
    tokenized: Sequence[TokenizeResult],
    tokenizer: TrainedTokenizer,
    config: PrepareConfig,
    work: Path,
) -> list[tuple[PackTask, PackResult]]:
    """Packs each split of each source, in groups of consecutive partitions that fill about a shard."""
    token_bytes = token_type(tokenizer.vocab_size).itemsize
    tasks, sizes = [], []
    for source, numbers in groupby(range(len(read)), key=lambda number: read[number].source):
        members = list(numbers)
        for split in SPLITS:
            for group in group_by_tokens(members, split, tokenized, config.packing.shard_bytes // token_bytes):
                paths = tuple(work / "tokens" / f"{number:06d}" for number in group)
                folder = work / "shards" / f"{source}-{split}-{group[0]:06d}"
                tasks.append(PackTask(source, paths, split, config.row_length, token_bytes, config.packing, folder))
                sizes.append(token_bytes * sum(tokenized[number].tokens[split] for number in group))
    return list(zip(tasks, run("pack", engine, pack_group, tasks, sizes, PackResult), strict=True))


def publish_all(
    inputs: Sequence[InputFile],
    partitions: Sequence[Partition],
    fingerprint: str,
    read: Sequence[ReadResult],
    tokenizer: TrainedTokenizer,
    tokenized: Sequence[TokenizeResult],
    packed: Sequence[tuple[PackTask, PackResult]],
    config: PrepareConfig,
    work: Path,
) -> Manifest:
    """Writes report and manifest, and gives everything its final place."""
    report = make_report(read, tokenized, [(task.split, result) for task, result in packed], config.row_length)
    report_bytes = canonical_json(report)
    shards = dict(name_shards(packed))
    tokenizer_path = f"{TOKENIZER}/{tokenizer.file_name}"
    files: dict[str, Path | bytes] = {tokenizer_path: work / tokenizer_path, REPORT: report_bytes}
    manifest = Manifest(
        fingerprint=fingerprint,
        row_length=config.row_length,
        vocab_size=tokenizer.vocab_size,
        token_type=token_type(tokenizer.vocab_size).name,
        tokenizer_kind=tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        sources=tuple(dict.fromkeys(file.source for file in inputs)),
        shards=tuple(shards),
        files={tokenizer_path: digest_file(work / tokenizer_path), REPORT: digest_bytes(report_bytes)},
        inputs=tuple(file.identity for file in inputs),
        partitions=tuple(partition.identity for partition in partitions),
        config=config.portable,
        totals=report,
    )
    if config.keep_rejects:
        files[REJECTS] = json_lines(collect_rejects(partitions, read))
    return publish(config.output, work, manifest, {entry.path: path for entry, path in shards.items()}, files)


def name_shards(packed: Sequence[tuple[PackTask, PackResult]]) -> Iterator[tuple[ShardEntry, Path]]:
    """The manifest's entry for each shard, numbered within its source and split, and where it is now."""
    numbers: Counter[tuple[str, Split]] = Counter()
    for task, result in packed:
        for shard in result.shards:
            number = numbers[task.source, task.split]
            numbers[task.source, task.split] += 1
            counts = {name: value for name, value in shard.items() if name != "name"}
            path = f"{task.split}/{task.source}-{number:05d}.arrow"
            yield ShardEntry(path=path, split=task.split, source=task.source, **counts), task.output / shard["name"]


def group_by_tokens(
    numbers: Sequence[int], split: Split, tokenized: Sequence[TokenizeResult], group_tokens: int
) -> Iterator[list[int]]:
    """Consecutive partitions that together reach `group_tokens` of a split; what is left over makes a last, smaller group."""
    group: list[int] = []
    tokens = 0
    for number in numbers:
        group.append(number)
        tokens += tokenized[number].tokens[split]
        if tokens >= group_tokens:
            yield group
            group, tokens = [], 0
    if tokens:
        yield group


def run(
    name: str,
    engine: Engine,
    function: Callable[[TaskT], ResultT],
    tasks: list[TaskT],
    sizes: Sequence[int],
    result_type: Callable[..., ResultT],
) -> list[ResultT]:
    """All results of a stage, with its progress shown."""
    results = []
    with stage_progress(name, sum(sizes)) as advance:
        for size, result in zip(sizes, run_stage(engine, function, tasks, result_type), strict=True):
            results.append(result)
            advance(size)
    return results

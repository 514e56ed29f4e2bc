from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from common.files import digest_bytes, write_atomic
from data_pipeline.config import PrepareConfig, TokenizerConfig
from data_pipeline.conversations.chat_template import TEMPLATE_FILE, ChatTemplate
from data_pipeline.dataset.layout import TOKENIZER
from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.execution.tasks import commit_result
from data_pipeline.stages.job import Job, PartitionTask
from data_pipeline.stages.split import SplitResult, read_kept, texts_of
from data_pipeline.tokenizer import Tokenizer, open_supplied, save_tokenizer
from data_pipeline.tokenizer.training import alphabet_of, sample_pieces, train_tokenizer

logger = logging.getLogger(__name__)


def with_bos_of_supplied(config: PrepareConfig) -> PrepareConfig:
    """Return settings without bos for a supplied tokenizer that puts none before a text, unless the user has set it."""
    settings = config.tokenizer
    if settings.path is None or "add_bos" in settings.model_fields_set:
        return config
    tokenizer = open_supplied(settings.path, settings.chosen_names)
    if tokenizer.first_ids:
        return config
    reason = "names no bos token" if tokenizer.bos_id is None else "puts no bos token before a text"
    logger.info("tokenizer.add_bos = false, because %s %s; set it to true for documents that begin with one", settings.path, reason)
    return config.model_copy(update={"tokenizer": settings.model_copy(update={"add_bos": False})})


def train_on_sample(job: Job, split: Sequence[SplitResult], chat: ChatTemplate | None = None) -> TrainedTokenizer:
    """Train on a sample, or use the tokenizer of the user. Its folder also gets the chat template."""
    settings = job.config.tokenizer
    sizes = [result.bytes["train"] for result in split]
    samples: list[SampleTask] = []
    if settings.is_trained:
        fraction = settings.sample_bytes / max(sum(sizes), 1)
        samples = job.tasks(SampleTask, fraction=fraction)
        job.run("sample", sample_partition, samples, sizes, dict)
    outputs = tuple(sample.output for sample in samples)
    special = job.special_tokens if settings.path is None else job.config.augment.special_tokens
    task = TrainTask(outputs, settings, special, sum(sizes), job.work / TOKENIZER, None if chat is None else chat.source)
    [tokenizer] = job.run("train", train, [task], [min(sum(sizes), settings.sample_bytes)], TrainedTokenizer)
    return tokenizer


_SAMPLE_SCHEMA = pa.schema([("text", pa.large_string())])


@dataclass(frozen=True)
class SampleTask(PartitionTask):
    folder = "sample"
    fraction: float


def sample_partition(task: SampleTask) -> dict[str, int]:
    """Write pieces of the training text; only its alphabet for a tokenizer of characters."""
    num_bytes = 0
    texts = (text for batch in read_kept(task.place("text"), task.place("split")) for text in texts_of(batch, "train"))
    with TableWriter(task.output, _SAMPLE_SCHEMA) as table:
        for piece in [alphabet_of(texts)] if task.config.tokenizer.kind == "char" else sample_pieces(texts, task.fraction):
            data = piece.encode()
            table.add((data,), len(data))
            num_bytes += len(data)
    return commit_result(task, {"bytes": num_bytes}, table.written)


@dataclass(frozen=True)
class TrainTask:
    samples: tuple[Path, ...]
    settings: TokenizerConfig
    extra_special: tuple[str, ...]
    num_bytes: int  # size of the whole training text
    output: Path  # folder of the tokenizer
    chat: str | None = None  # the chat template that goes with it


@dataclass(frozen=True)
class TrainedTokenizer:
    kind: str
    vocab_size: int
    digest: str
    pad_id: int
    files: Mapping[str, str]  # digest of each file in its folder, by name

    @staticmethod
    def of(tokenizer: Tokenizer) -> TrainedTokenizer:
        files = {name: digest_bytes(content) for name, content in tokenizer.files().items()}
        return TrainedTokenizer(tokenizer.kind, tokenizer.vocab_size, tokenizer.digest, tokenizer.pad_id, files)


def train(task: TrainTask) -> TrainedTokenizer:
    sample = [text for path in task.samples for batch in read_batches(path) for text in batch.column("text").to_pylist()]
    tokenizer = train_tokenizer(sample, task.settings, task.extra_special, task.num_bytes)
    tokenizer.adds_bos = task.settings.add_bos
    save_tokenizer(tokenizer, task.output)
    trained = TrainedTokenizer.of(tokenizer)
    if task.chat is not None:
        content = task.chat.encode()
        write_atomic(task.output / TEMPLATE_FILE, content)
        trained = replace(trained, files={**trained.files, TEMPLATE_FILE: digest_bytes(content)})
    return commit_result(task, trained, {task.output / name: digest for name, digest in trained.files.items()})

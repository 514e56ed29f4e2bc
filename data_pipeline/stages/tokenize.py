"""Encodes documents as token ids, and scores their quality from the ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_pipeline.config import KINDS, PrepareConfig
from data_pipeline.dataset.layout import TOKENIZER, TOKENS, tokens_schema
from data_pipeline.dataset.shards import token_type
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.dataset.tables import TableWriter
from data_pipeline.execution.tasks import Counts, add_counts, commit_result
from data_pipeline.quality.perplexity import count_scores
from data_pipeline.stages.augment import Augmenter, is_on
from data_pipeline.stages.job import Job
from data_pipeline.stages.split import SplitResult, read_kept
from data_pipeline.stages.train_quality import MODELS, Models, load_models
from data_pipeline.tokenizer import Encoded, Tokenizer, load_tokenizer, round_trip_failures

__all__ = ["TokenizeResult", "TokenizeTask", "tokenize_all", "tokenize_partition"]


def tokenize_all(job: Job, split: Sequence[SplitResult]) -> list[TokenizeResult]:
    """Encode and score the documents of every partition."""
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


_ROUND_TRIPS = 8  # documents of each partition whose ids are decoded to compare the text


@dataclass(frozen=True)
class TokenizeTask:
    """Encode and score the documents of one partition."""

    text: Path
    split: Path
    tokenizer: Path
    models: Path
    """Folder of the quality models."""
    config: PrepareConfig
    output: Path


@dataclass
class TokenizeResult:
    """Counts of one partition."""

    sha256: str = ""
    """Digest of the token table."""
    tokens: int = 0
    unknown: int = 0
    round_trip_failures: int = 0
    """How many of the first documents do not decode to the same text."""
    scores: Counts = field(default_factory=dict)
    """Number of documents by score under the reference model."""
    probabilities: Counts = field(default_factory=dict)
    """Number of documents by probability under the classifier."""
    augmented: Counts = field(default_factory=dict)


def tokenize_partition(task: TokenizeTask) -> TokenizeResult:
    """Write the token ids of a partition's documents, with their facts and scores, to `output`.arrow."""
    tokenizer = _load(task.tokenizer)
    models = load_models(task.models, task.config.quality)
    augmenter = Augmenter(tokenizer, task.config.augment) if is_on(task.config.augment) else None
    ids_type = token_type(tokenizer.vocab_size)
    schema = tokens_schema(ids_type)
    result = TokenizeResult()
    with TableWriter(task.output, schema) as table:
        for batch in read_kept(task.text, task.split):
            texts: list[str] = batch.column("text").to_pylist()
            if not result.tokens:
                result.round_trip_failures = round_trip_failures(tokenizer, texts[:_ROUND_TRIPS])
            plain = tokenizer.encode_flat(texts)
            perplexity_D, wanted_D = _score(texts, plain, models, result)
            changed = plain if augmenter is None else _augment(augmenter, plain, batch, texts, result)
            settings = task.config.tokenizer
            encoded = tokenizer.frame(changed, add_bos=settings.add_bos, add_eos=settings.add_eos)
            result.tokens += len(encoded.ids_T)
            result.unknown += 0 if tokenizer.unk_id is None else int((encoded.ids_T == tokenizer.unk_id).sum())
            offsets = pa.array(np.concatenate([[0], encoded.ends_D]))
            columns = [
                *(batch.column(name) for name in ("id", "split", "kind", "language", "metadata", "characters")),
                pc.cast(pc.binary_length(batch.column("text")), pa.uint32()),
                pa.array(perplexity_D),
                pa.array(wanted_D),
                pa.LargeListArray.from_arrays(offsets, pa.array(encoded.ids_T.astype(ids_type))),
            ]
            table.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    result.sha256 = table.digest
    return commit_result(task, result, table)


@lru_cache(maxsize=1)
def _load(folder: Path) -> Tokenizer:
    """Load the tokenizer once per process, because its word cache is reused for later partitions."""
    return load_tokenizer(folder, trial=False)


def _augment(augmenter: Augmenter, plain: Encoded, batch: pa.RecordBatch, texts: Sequence[str], result: TokenizeResult) -> Encoded:
    """Return the documents with the training documents changed, and count the changes."""
    places = np.flatnonzero(batch.column("split").to_numpy() == SPLITS.index("train")).tolist()
    kinds, ids = ([batch.column(name)[place].as_py() for place in places] for name in ("kind", "id"))
    changed, counts = augmenter.encode([texts[place] for place in places], [KINDS[kind] for kind in kinds], ids)
    arrays = plain.arrays()
    for place, array in zip(places, changed.arrays(), strict=True):
        arrays[place] = array
    result.augmented = add_counts([result.augmented, counts])
    return Encoded.of(arrays)


def _score(
    texts: Sequence[str], encoded: Encoded, models: Models, result: TokenizeResult
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return the perplexity and the probability of being wanted of each document; 0 if there is no model."""
    perplexity_D, wanted_D = np.zeros((2, len(encoded.ends_D)), np.uint16)
    if models.reference is not None:
        perplexity_D = models.reference.score(texts, encoded)
        result.scores = add_counts([result.scores, count_scores(perplexity_D)])
    if models.classifier is not None:
        wanted_D = models.classifier.probability(encoded.ids_T, encoded.ends_D)
        result.probabilities = add_counts([result.probabilities, count_scores(wanted_D)])
    return perplexity_D, wanted_D

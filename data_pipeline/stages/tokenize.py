"""Encodes documents as ids and scores them. Shape suffixes: D documents of a batch, P parts, T ids of all documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_pipeline.config import KINDS, PrepareConfig
from data_pipeline.conversations.rendering import EncodedChat, encode_chats
from data_pipeline.dataset.layout import TOKENIZER, TOKENS
from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.shards import token_type
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.dataset.tables import TableWriter, tokens_schema
from data_pipeline.documents import Reason, cut_text
from data_pipeline.execution.tasks import Counts, add_counts, commit_result
from data_pipeline.quality.classifier import PROBABILITY_STEPS, Classifier, HeldOut
from data_pipeline.quality.perplexity import count_values
from data_pipeline.stages.augment import Augmenter
from data_pipeline.stages.job import Job, PartitionTask
from data_pipeline.stages.split import SplitResult, read_kept
from data_pipeline.stages.train_quality import MODELS, Score, load_models
from data_pipeline.stages.train_tokenizer import TrainedTokenizer
from data_pipeline.tokenizer import Encoded, Tokenizer, load_tokenizer, round_trip_failures


def tokenize_all(job: Job, split: Sequence[SplitResult]) -> list[TokenizeResult]:
    return job.run(
        "tokenize", tokenize_partition, job.tasks(TokenizeTask), [sum(result.bytes.values()) for result in split], TokenizeResult
    )


def report_of_tokens(
    config: PrepareConfig, tokenizer: TrainedTokenizer, held_out: HeldOut | None, tokenized: Sequence[TokenizeResult]
) -> dict[str, Any]:
    classified = {}
    if held_out is not None:
        histogram = [0] * 10
        for probability, count in add_counts(result.probabilities for result in tokenized).items():
            histogram[min(int(probability) * 10 // PROBABILITY_STEPS, 9)] += count
        bins = [[number / 10, (number + 1) / 10, count] for number, count in enumerate(histogram)]
        classified = {"held_out": asdict(held_out), "histogram": bins}
    return {
        "classifier": classified,
        "augmentation": add_counts(result.augmented for result in tokenized),
        **({"conversations": add_counts(result.chats for result in tokenized)} if config.chat.is_on else {}),
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "digest": tokenizer.digest,
            "round_trip_failures": sum(result.round_trip_failures for result in tokenized),
            "unknown": sum(result.unknown for result in tokenized),
        },
    }


WITHOUT_TOKENS = (Reason.NO_TOKENS, Reason.TOO_MANY_TOKENS, Reason.EQUAL_IDS)
"""Why a document has no tokens, by the number of its runs in the token table, which have length 0."""
_ROUND_TRIPS = 8  # documents of each partition whose ids are decoded to compare the text


@dataclass(frozen=True)
class TokenizeTask(PartitionTask):
    folder = TOKENS


@dataclass
class TokenizeResult:
    sha256: str = ""  # digest of the token table
    tokens: int = 0
    unknown: int = 0
    round_trip_failures: int = 0  # how many of the first documents do not decode to the same text
    scores: Counts = field(default_factory=dict)  # number of documents by score under the reference model
    probabilities: Counts = field(default_factory=dict)  # number of documents by probability under the classifier
    augmented: Counts = field(default_factory=dict)
    chats: Counts = field(default_factory=dict)  # all conversations or pairs, cut ones, too long ones


def tokenize_partition(task: TokenizeTask) -> TokenizeResult:
    tokenizer = _load(task.work / TOKENIZER)
    reference, classifier = load_models(task.work / MODELS, task.config.quality)
    augmenter = Augmenter(tokenizer, task.config.augment) if task.config.augment.is_on else None
    ids_type = token_type(tokenizer.vocab_size)
    settings = task.config.tokenizer
    schema = tokens_schema(ids_type, has_mask=task.config.has_mask)
    result = TokenizeResult()
    with TableWriter(task.output, schema) as table:
        for batch in read_kept(task.place("text"), task.place("split")):
            texts: list[str] = batch.column("text").to_pylist()
            if not result.tokens:
                result.round_trip_failures = round_trip_failures(tokenizer, texts[:_ROUND_TRIPS])
            parts = _Parts.of(texts, batch.column("parts").to_pylist()) if task.config.has_mask else None
            plain = tokenizer.encode_flat(texts) if parts is None else parts.encode(tokenizer)
            perplexity_D, wanted_D = _score(texts, plain, reference, classifier, result)
            changed = plain if augmenter is None else _augment(augmenter, plain, batch, texts, result)
            encoded = tokenizer.frame(changed, add_bos=settings.add_bos, add_eos=settings.add_eos)
            mask = None
            if parts is not None:
                has_loss_T = parts.has_loss(changed, encoded, has_bos=settings.add_bos and tokenizer.bos_id is not None)
                encoded, mask = _with_chats(encoded, has_loss_T, _chats(batch, texts, tokenizer, task, result))
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
            if mask is not None:
                ends_D = np.cumsum(mask.num_runs_B)
                columns.append(pa.ListArray.from_arrays(pa.array(np.append(0, ends_D).astype(np.int32)), pa.array(mask.runs_N)))
            table.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    result.sha256 = table.digest
    return commit_result(task, result, table.written)


@dataclass
class _Parts:
    """The parts of some documents, alternately without and with a loss; a document of one part has a loss."""

    pieces_P: list[str]
    num_parts_D: NDArray[np.int64]
    lengths_P: NDArray[np.int64]  # number of tokens of each part, without bos and eos

    @staticmethod
    def of(texts: Sequence[str], parts: Sequence[Sequence[int]]) -> _Parts:
        pieces = [cut_text(text, lengths) for text, lengths in zip(texts, parts, strict=True)]
        num_parts_D = np.array([len(one) for one in pieces], np.int64)
        return _Parts([piece for one in pieces for piece in one], num_parts_D, np.empty(0, np.int64))

    def encode(self, tokenizer: Tokenizer) -> Encoded:
        """Return the ids of the documents. Each part is encoded alone, so no token has text of two parts."""
        encoded = tokenizer.encode_flat(self.pieces_P)
        self.lengths_P = np.diff(encoded.ends_D, prepend=0)
        return Encoded(encoded.ids_T, encoded.ends_D[np.cumsum(self.num_parts_D) - 1])

    def has_loss(self, changed: Encoded, framed: Encoded, *, has_bos: bool) -> NDArray[np.bool_]:
        """Bos and eos belong to the first and last part. `changed` are the documents without them, `framed` with them."""
        sizes_D, framed_D = (np.diff(encoded.ends_D, prepend=0) for encoded in (changed, framed))
        firsts_D = np.cumsum(self.num_parts_D) - self.num_parts_D
        lengths_P, numbers_P = self.lengths_P.copy(), np.arange(len(self.lengths_P)) - np.repeat(firsts_D, self.num_parts_D)
        is_alone_D = self.num_parts_D == 1
        lengths_P[firsts_D[is_alone_D]] = sizes_D[is_alone_D]  # augmentation may have changed it
        lengths_P[firsts_D] += has_bos
        lengths_P[firsts_D + self.num_parts_D - 1] += framed_D - sizes_D - has_bos
        has_loss_P = (numbers_P % 2 == 1) | np.repeat(is_alone_D, self.num_parts_D)
        return np.repeat(has_loss_P, lengths_P)


def _chats(
    batch: pa.RecordBatch, texts: Sequence[str], tokenizer: Tokenizer, task: TokenizeTask, result: TokenizeResult
) -> dict[int, EncodedChat | Reason]:
    """Return them by place in the batch, as they fit into a row, or why they have no tokens."""
    if "special" not in batch.schema.names:
        return {}
    special = batch.column("special").to_pylist()
    parts = batch.column("parts").to_pylist()
    places = [place for place, lengths in enumerate(special) if lengths]
    encoded = encode_chats(
        tokenizer, [texts[place] for place in places], [parts[place] for place in places], [special[place] for place in places]
    )
    config = task.config
    cut = config.chat.too_long == "truncate" and not config.records.has_pairs
    fitted = [chat.fitted(config.row_length, may_cut=cut) for chat in encoded]
    if config.records.has_pairs:  # a tokenizer that has no token for an answer leaves a pair that cannot be cut in two
        fitted = [chat if chat is not None and chat.num_answers == 2 else None for chat in fitted]
    num_cut = sum(after is not None and after is not before for before, after in zip(encoded, fitted, strict=True))
    counts = {"documents": len(encoded), "cut": num_cut, "too_long": fitted.count(None)}
    result.chats = add_counts([result.chats, counts])
    found = {place: chat or Reason.TOO_MANY_TOKENS for place, chat in zip(places, fitted, strict=True)}
    if not config.records.has_pairs:
        return found
    return {place: chat if isinstance(chat, Reason) or _has_preference(chat) else Reason.EQUAL_IDS for place, chat in found.items()}


def _has_preference(pair: EncodedChat) -> bool:
    """Return whether a model can tell the answers apart: texts that differ may have the same ids."""
    second = 1 + int(np.flatnonzero(pair.has_loss_T[:-1] & ~pair.has_loss_T[1:])[0])
    return not np.array_equal(pair.ids_T[:second], pair.ids_T[second:])


def _with_chats(
    encoded: Encoded, has_loss_T: NDArray[np.bool_], chats: Mapping[int, EncodedChat | Reason]
) -> tuple[Encoded, LossMask]:
    if not chats:
        return encoded, LossMask.of(has_loss_T, np.diff(encoded.ends_D, prepend=0))
    arrays, masks = encoded.arrays(), np.split(has_loss_T, encoded.ends_D[:-1])
    num_added_D = np.zeros(len(arrays), np.int64)
    for place, chat in chats.items():
        if isinstance(chat, Reason):
            num_added_D[place], chat = WITHOUT_TOKENS.index(chat), EncodedChat.nothing()  # noqa: PLW2901
        arrays[place], masks[place] = chat.ids_T, chat.has_loss_T
    found = LossMask.of(np.concatenate(masks), np.array([len(ids) for ids in arrays], np.int64))
    starts_D = np.cumsum(found.num_runs_B) - found.num_runs_B
    runs_N = np.insert(found.runs_N, np.repeat(starts_D, num_added_D), 0)
    return Encoded.of(arrays), LossMask(runs_N, found.num_runs_B + num_added_D)


@lru_cache(maxsize=1)
def _load(folder: Path) -> Tokenizer:
    """Load the tokenizer once per process, because its word cache is reused for later partitions."""
    return load_tokenizer(folder, trial=False)


def _augment(augmenter: Augmenter, plain: Encoded, batch: pa.RecordBatch, texts: Sequence[str], result: TokenizeResult) -> Encoded:
    """A document with a loss mask stays as it is, because a change would move the borders of its parts."""
    is_train_D = batch.column("split").to_numpy() == SPLITS.index("train")
    has_parts_D = pc.list_value_length(batch.column("parts")).to_numpy() > 0
    places = np.flatnonzero(is_train_D & ~has_parts_D).tolist()
    kinds, ids = ([batch.column(name)[place].as_py() for place in places] for name in ("kind", "id"))
    changed, counts = augmenter.encode([texts[place] for place in places], [KINDS[kind] for kind in kinds], ids)
    arrays = plain.arrays()
    for place, array in zip(places, changed.arrays(), strict=True):
        arrays[place] = array
    masked = int((is_train_D & has_parts_D).sum())
    result.augmented = add_counts([result.augmented, counts, {"unchanged_with_mask": masked} if masked else {}])
    return Encoded.of(arrays)


def _score(
    texts: Sequence[str], encoded: Encoded, reference: Score | None, classifier: Classifier | None, result: TokenizeResult
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return perplexity and probability of being wanted; 0 if there is no model."""
    perplexity_D, wanted_D = np.zeros((2, len(encoded.ends_D)), np.uint16)
    if reference is not None:
        perplexity_D = reference(texts, encoded)
        result.scores = add_counts([result.scores, count_values(perplexity_D)])
    if classifier is not None:
        wanted_D = classifier.probability(encoded.ids_T, encoded.ends_D)
        result.probabilities = add_counts([result.probabilities, count_values(wanted_D)])
    return perplexity_D, wanted_D

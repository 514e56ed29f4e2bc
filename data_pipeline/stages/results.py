"""The results that stages hand on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import digest_bytes
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.execution.tasks import Counts
from data_pipeline.packing.pieces import METHODS
from data_pipeline.quality.bounds import Bounds
from data_pipeline.tokenizer import Tokenizer

__all__ = [
    "ClassifierResult",
    "Cuts",
    "DocumentsOf",
    "PackResult",
    "ReadResult",
    "ReferenceResult",
    "SampleResult",
    "SelectResult",
    "SplitResult",
    "TokenizeResult",
    "TrainedTokenizer",
    "WeighResult",
]


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


@dataclass
class ReadResult:
    """Counts of one partition."""

    source: str
    input_bytes: int
    documents: int = 0
    """Everything that was read, rejections included; in JSON Lines this is the number of lines."""
    kept: int = 0
    bytes: int = 0
    """Of the kept documents, as UTF-8."""
    rejected: Counts = field(default_factory=dict)
    changes: Counts = field(default_factory=dict)
    """How many documents were changed by each cleaning rule."""
    confidences: dict[str, Counts] = field(default_factory=dict)
    """Number of documents by language and by the confidence with which it was identified."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The first rejections of each reason."""


@dataclass
class SplitResult:
    """What is left of one partition."""

    kept: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The first documents of each kind of duplicate."""


@dataclass(frozen=True)
class SampleResult:
    """Size of one partition's share."""

    bytes: int


@dataclass(frozen=True)
class TrainedTokenizer:
    """What is known of the tokenizer without loading it."""

    kind: str
    vocab_size: int
    digest: str
    pad_id: int
    files: Mapping[str, str]
    """The digest of each file in its folder, by name."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> TrainedTokenizer:
        """The facts of a tokenizer."""
        files = {name: digest_bytes(content) for name, content in tokenizer.files().items()}
        return TrainedTokenizer(tokenizer.kind, tokenizer.vocab_size, tokenizer.digest, tokenizer.pad_id, files)


@dataclass(frozen=True)
class ReferenceResult:
    """How much it was trained on."""

    tokens: int


@dataclass(frozen=True)
class ClassifierResult:
    """How well it does on examples that it was not trained on."""

    good: int
    good_kept: int
    bad: int
    bad_dropped: int
    accuracy: float


@dataclass
class TokenizeResult:
    """Counts of one partition."""

    sha256: str = ""
    """Digest of the table of tokens."""
    tokens: int = 0
    unknown: int = 0
    round_trip_failures: int = 0
    """How many of the first documents did not come back from their ids as they were."""
    scores: Counts = field(default_factory=dict)
    """Number of documents by their score under the reference model."""
    probabilities: Counts = field(default_factory=dict)
    """Number of documents by the classifier's probability."""
    augmented: Counts = field(default_factory=dict)


@dataclass(frozen=True)
class Cuts:
    """What a document of a source must reach."""

    bounds: Bounds
    by_perplexity: bool
    by_classifier: bool


@dataclass(frozen=True)
class WeighResult:
    """Training tokens by group, of documents that are good enough."""

    tokens: Counts


@dataclass
class SelectResult:
    """What was chosen of one partition. Lengths, bytes and languages count a document once, however often it is taken."""

    sha256: str = ""
    """Digest of the table of choices."""
    kept: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """With repeats, as they go into rows."""
    unique_tokens: int = 0
    rejected: Counts = field(default_factory=dict)
    characters: Counts = field(default_factory=dict)
    """Number of documents by their length in characters."""
    lengths: Counts = field(default_factory=dict)
    """Number of documents by their length in tokens, bos and eos included."""
    languages: dict[str, Counts] = field(default_factory=dict)
    """Documents, bytes and tokens by language."""
    kinds: Counts = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The first rejected documents of each reason."""
    offered: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Documents that there were to choose from."""


@dataclass
class PackResult:
    """Counts of one group of partitions, and its shards in order."""

    documents: int = 0
    cut_documents: int = 0
    document_tokens: int = 0
    """Tokens of the documents, before some are repeated where a document is cut."""
    methods: dict[str, Counts] = field(
        default_factory=lambda: {method: {"rows": 0, "cut_documents": 0, "tokens": 0} for method in METHODS}
    )
    """What each way of packing would do with the same documents."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    """Name, rows, tokens, targets, bytes and digest of each."""

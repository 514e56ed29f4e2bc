"""What must hold before the next stage is worth its time; each refusal says what was found and what to change."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError, SourceError
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.splits import SPLITS, fewest_held_out
from data_pipeline.dedup.duplicates import Duplicates
from data_pipeline.documents import Reason
from data_pipeline.execution.tasks import add_counts
from data_pipeline.sources.inputs import InputFile, Partition
from data_pipeline.stages.read import ReadResult
from data_pipeline.stages.rejects import collect_rejects
from data_pipeline.stages.select import SelectResult
from data_pipeline.stages.split import SplitResult

__all__ = ["check_positions_exist", "check_rejected", "check_selected", "check_split", "check_trusted", "warn_of_losses"]

logger = logging.getLogger(__name__)

_SHOWN = 3  # files in a message


def check_positions_exist(inputs: Sequence[InputFile], config: PrepareConfig) -> None:
    """A split by position needs files with positions: plain text, uncompressed."""
    for file in inputs:
        if config.split.by == "tail" and (file.format != "text" or file.compression != "none"):
            raise SourceError(f"{file.location}: split.by = tail needs plain uncompressed text files; set split.by to content")


def check_trusted(inputs: Sequence[InputFile], config: PrepareConfig) -> None:
    """Refuses a trusted source, or one with a weight, that is none of the sources, before an hour goes by."""
    sources = list(dict.fromkeys(file.source for file in inputs))
    if config.quality.trusted not in (None, *sources):
        raise ConfigError(f"quality.trusted = {config.quality.trusted} is no source; there are {', '.join(sources)}")
    weighed = config.balance.weights if config.balance.by == "source" else {}
    if unknown := [name for name in weighed if name not in (*sources, *config.source)]:
        raise ConfigError(f"balance.weights.{unknown[0]} is no source; there are {', '.join(sources)}")


def check_rejected(partitions: Sequence[Partition], read: Sequence[ReadResult], config: PrepareConfig) -> None:
    """Refuses input of which more is malformed than the reject budget allows; warns where all of a source or file is lost in it."""
    documents = sum(result.documents for result in read)
    malformed: Counter[Reason] = Counter()
    for result in read:
        malformed.update({Reason(reason): count for reason, count in result.rejected.items() if Reason(reason).malformed})
    if malformed.total() <= config.limits.max_rejected_fraction * documents:
        _warn_of_lost_sources(partitions, read)
        _warn_of_lost_files(partitions, read)
        return
    first = next(sample for sample in collect_rejects(partitions, read) if Reason(sample["reason"]).malformed)
    [(commonest, count)] = malformed.most_common(1)
    raise SourceError(
        f"source {first['source']}, {_place(first)}; the first of {malformed.total()} malformed "
        f"among {documents} documents (most often {commonest}, {count}), and limits.max_rejected_fraction = "
        f"{config.limits.max_rejected_fraction}; mend the input or raise that limit"
    )


def _warn_of_lost_sources(partitions: Sequence[Partition], read: Sequence[ReadResult]) -> None:
    """A budget for all sources together can let one of them go whole."""
    of_source: dict[str, list[ReadResult]] = {}
    for result in read:
        of_source.setdefault(result.source, []).append(result)
    for source, results in of_source.items():
        if not any(result.kept for result in results):
            documents = sum(result.documents for result in results)
            samples = (sample for sample in collect_rejects(partitions, read) if sample["source"] == source)
            first = next((f"; the first is {_place(sample)}" for sample in samples), "")
            logger.warning(
                "source %s: nothing of it is kept, of %d documents (%s%s)", source, documents, _commonest(results), first
            )


def _warn_of_lost_files(partitions: Sequence[Partition], read: Sequence[ReadResult]) -> None:
    """A file that cannot be read on is one rejection, however many documents it holds. Members of archives are not named."""
    given_up = [sample for sample in collect_rejects(partitions, read) if not sample["line"] and "!/" not in sample["path"]]
    if given_up:
        shown = "; ".join(f"source {sample['source']}, {_place(sample)}" for sample in given_up[:_SHOWN])
        more = "; and more, see the report" if len(given_up) > _SHOWN else ""
        logger.warning("files that were given up, with what came after in them: %s%s", shown, more)


def _place(sample: Mapping[str, Any]) -> str:
    where = f"{sample['path']}:{sample['line']}" if sample["line"] else sample["path"]
    return f"{where}: {sample['reason']}: {sample['detail']}"


def check_split(read: Sequence[ReadResult], split: Sequence[SplitResult], config: PrepareConfig) -> None:
    """Refuses input that leaves nothing to train on or too little to validate with."""
    train_documents, val_documents = (sum(result.kept[side] for result in split) for side in SPLITS)
    if not train_documents:
        raise SourceError(
            f"no document is left to train on, of {sum(result.documents for result in read)} that were read ({val_documents} are "
            f"held out; {_commonest(read)}); add text, or loosen what rejects it"
        )
    documents, wanted = train_documents + val_documents, config.split.min_val_documents
    if val_documents < (wanted if config.split.by == "tail" else fewest_held_out(wanted, documents)):
        raise SourceError(
            f"{val_documents} validation documents among {documents}, but split.min_val_documents = {wanted}; add text, raise "
            "split.val_fraction, set text.documents to chunks or paragraphs, or lower split.min_val_documents"
        )
    if val_documents < wanted:
        logger.warning(
            "few validation documents: %d of %d, so that the validation loss says little; add text, or set text.documents to "
            "chunks or paragraphs",
            val_documents,
            documents,
        )


def _commonest(read: Sequence[ReadResult]) -> str:
    rejected = Counter(add_counts(result.rejected for result in read))
    return ", ".join(f"{count} {reason}" for reason, count in rejected.most_common(3)) or "none was rejected when it was read"


def check_selected(selected: Sequence[SelectResult]) -> None:
    """Refuses settings of quality and balance that leave nothing of a side that there was."""
    for side in SPLITS:
        offered = sum(result.offered[side] for result in selected)
        if offered and not any(result.kept[side] for result in selected):
            reasons = add_counts(result.rejected for result in selected)
            found = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            raise SourceError(
                f"none of {offered} {side} documents is left after selection ({found}); loosen the thresholds of quality, change "
                "the weights of balance, or use another tokenizer"
            )


def warn_of_losses(duplicates: Duplicates, config: PrepareConfig) -> None:
    """Says which sources lose most of their documents as duplicates: that is rarely what was meant."""
    for source in duplicates.alarms:
        counts = duplicates.sources[source]
        logger.warning(
            "source %s: %d of %d documents are duplicates, more than dedup.alarm_fraction = %s; look at the largest clusters in "
            "the report, and raise dedup.threshold if they are not alike",
            source,
            sum(counts.values()) - counts["kept"],
            sum(counts.values()),
            config.dedup.alarm_fraction,
        )

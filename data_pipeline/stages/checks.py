"""Checks between stages: a preparation that cannot succeed fails before the next stage."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError, SourceError
from common.text import some_of
from data_pipeline.config import PrepareConfig, settings_without_effect
from data_pipeline.dataset.layout import MAX_LABELS
from data_pipeline.dataset.splits import SPLITS, fewest_held_out
from data_pipeline.dedup.duplicates import Duplicates
from data_pipeline.documents import Reason
from data_pipeline.execution.tasks import add_counts
from data_pipeline.filters.language import CODE, check_codes
from data_pipeline.sources.inputs import InputFile, Partition
from data_pipeline.stages.read import ReadResult
from data_pipeline.stages.rejects import collect_rejects
from data_pipeline.stages.select import SelectResult, labels_of
from data_pipeline.stages.split import SplitResult, share_lost_to_benchmarks

logger = logging.getLogger(__name__)

_SHOWN, _MOST_SHOWN = 3, 8  # files and fields in a message
_METADATA = re.compile(
    r"[._](ids?|idx|index(_level_\d+__)?|uuid|hash|md5|sha\d*|url|uri|link|file(name)?|path|source|origin|domain|dataset|subset"
    r"|split|date|time|timestamp|created|updated|version|lang|language|licen[cs]e|author|model|scores?|rating|type|category|topic"
    r"|tags?|length|count|num_tokens|token_count)(_at)?$|[._](num|is|has|score)_|: \d+$",
    re.IGNORECASE,
)
"""Names of fields that say something about a text and are rarely text to train on. A table of pandas adds `Unnamed: 0`."""


def check_settings(inputs: Sequence[InputFile], config: PrepareConfig) -> None:
    for warning in settings_without_effect(config):
        logger.warning("%s", warning)
    for file in inputs:
        if config.split.by == "tail" and (file.format != "text" or file.compression != "none"):
            raise SourceError(f"{file.location}: split.by = tail needs plain uncompressed text files; set split.by to content")
    sources = list(dict.fromkeys(file.source for file in inputs))
    if config.quality.trusted not in (None, *sources):
        raise ConfigError(f"quality.trusted = {config.quality.trusted} is not a source; the sources are {', '.join(sources)}")
    if config.quality.trusted is not None and sources == [config.quality.trusted]:
        raise ConfigError(
            f"quality.trusted = {config.quality.trusted} is the only source, and the documents of the trusted source are not "
            "judged; add another source, or name a good text or a model in quality.reference instead"
        )
    weighed = config.balance.weights if config.balance.by == "source" else {}
    if unknown := [name for name in weighed if name not in (*sources, *config.source)]:
        raise ConfigError(f"balance.weights.{unknown[0]} is not a source; the sources are {', '.join(sources)}")

    for source in sources:
        own = config.for_source(source).language
        if own.keep:
            setting = "language.keep" if own.keep == config.language.keep else f"source.{source}.language.keep"
            check_codes(setting, own.keep, own)
    if config.balance.by == "language" and config.balance.weights:
        check_codes("balance.weights", sorted({*config.balance.weights} - {CODE}), config.language)


def check_rejected(partitions: Sequence[Partition], read: Sequence[ReadResult], config: PrepareConfig) -> None:
    documents = sum(result.documents for result in read)
    malformed: Counter[Reason] = Counter()
    for result in read:
        malformed.update({Reason(reason): count for reason, count in result.rejected.items() if Reason(reason).malformed})
    samples = list(collect_rejects(partitions, read))
    if malformed.total() > config.limits.max_rejected_fraction * documents:
        broken = next(sample for sample in samples if Reason(sample["reason"]).malformed)
        [(commonest, count)] = malformed.most_common(1)
        remedy = "correct the input"
        if commonest is Reason.INVALID_UTF8:
            remedy = (
                "convert it with `iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW`, with the name of its encoding (`iconv -l` lists all)"
            )
        raise SourceError(
            f"source {broken['source']}, {_place(broken)}. {malformed.total()} of {documents} documents are malformed (most often "
            f"{commonest}, {count}), a larger share than limits.max_rejected_fraction = {config.limits.max_rejected_fraction}; "
            f"{remedy}, or raise that limit"
        )
    # The budget for malformed documents misses sources of which nothing is kept, and files whose rest is skipped.
    for source in dict.fromkeys(result.source for result in read):
        results = [result for result in read if result.source == source]
        if not any(result.kept for result in results):
            documents = sum(result.documents for result in results)
            first = next((f"; first: {_place(sample)}" for sample in samples if sample["source"] == source), "")
            logger.warning("source %s: none of its %d documents is kept (%s%s)", source, documents, _commonest(results), first)
    _tell_unused(add_counts(result.unused for result in read))
    if given_up := [sample for sample in samples if not sample["line"] and "!/" not in sample["path"]]:  # archives name no members
        shown = "; ".join(f"source {sample['source']}, {_place(sample)}" for sample in given_up[:_SHOWN])
        more = "; the report lists more" if len(given_up) > _SHOWN else ""
        logger.warning("files that could not be read to the end, the rest of each is skipped: %s%s", shown, more)


def _tell_unused(unused: Mapping[str, int]) -> None:
    """Tell the fields that nothing uses. Metadata is usual, so it is one line without numbers."""
    counts = sorted(unused.items(), key=lambda item: (-item[1], item[0]))
    others = [(name, count) for name, count in counts if not _METADATA.search(name)]
    if metadata := [name.removeprefix("record.") for name, _ in counts if _METADATA.search(name)]:
        logger.info("metadata that nothing uses: %s", some_of(metadata, _MOST_SHOWN))
    of_records = [f"{name.removeprefix('record.')} ({count})" for name, count in others if name.startswith("record.")]
    if of_records:
        logger.warning("no setting uses these fields, with the number of records: %s", some_of(of_records, _MOST_SHOWN))
    if of_messages := [f"{name} ({count})" for name, count in others if not name.startswith("record.")]:
        logger.warning(
            "the chat template leaves out these fields, with the number of conversations: %s", some_of(of_messages, _MOST_SHOWN)
        )


def _place(sample: Mapping[str, Any]) -> str:
    where = f"{sample['path']}:{sample['line']}" if sample["line"] else sample["path"]
    return f"{where}: {sample['reason']}: {sample['detail']}"


def check_split(read: Sequence[ReadResult], duplicates: Duplicates, split: Sequence[SplitResult], config: PrepareConfig) -> None:
    for source in duplicates.alarms:
        counts = duplicates.sources[source]
        logger.warning(
            "source %s: %d of %d documents are duplicates, more than dedup.alarm_fraction = %s; look at the largest clusters in "
            "the report, and raise dedup.threshold if their documents differ",
            source,
            sum(counts.values()) - counts["kept"],
            sum(counts.values()),
            config.dedup.alarm_fraction,
        )
    for source, share in share_lost_to_benchmarks(read, split).items():
        if share > config.dedup.benchmark_alarm_fraction:
            logger.warning(
                "source %s: %.1f %% of its text is dropped because it shares text with dedup.benchmarks, more than "
                "dedup.benchmark_alarm_fraction = %s; read the samples in the report, remove benchmark items that are common "
                "phrases, or raise dedup.benchmark_words or dedup.benchmark_overlaps",
                source,
                100 * share,
                config.dedup.benchmark_alarm_fraction,
            )
    train_documents, val_documents = (sum(result.kept[side] for result in split) for side in SPLITS)
    if not train_documents:
        raise SourceError(
            f"no training document is left of {sum(result.documents for result in read)} that were read ({val_documents} are "
            f"held out for validation; {_commonest(read)}); add text, or loosen the rules that reject it"
        )
    documents, wanted = train_documents + val_documents, config.split.min_val_documents
    if val_documents < (wanted if config.split.by == "tail" else fewest_held_out(wanted, documents)):
        if documents == 1 and config.text.documents == "file":
            raise SourceError(
                "the text is one file, which counts as one document, and none is left for validation; "
                "add --text.documents paragraphs, which makes each paragraph a document"
            )
        raise SourceError(
            f"{val_documents} validation documents among {documents}, but split.min_val_documents = {wanted}; add text, raise "
            "split.val_fraction, set text.documents to chunks or paragraphs, or lower split.min_val_documents"
        )
    if val_documents < wanted:
        logger.warning(
            "only %d of %d documents are held out, so the validation loss is imprecise; add text, or set text.documents to "
            "chunks or paragraphs",
            val_documents,
            documents,
        )


def _commonest(read: Sequence[ReadResult]) -> str:
    rejected = Counter(add_counts(result.rejected for result in read))
    return ", ".join(f"{count} {reason}" for reason, count in rejected.most_common(3)) or "no document was rejected while reading"


def check_selected(selected: Sequence[SelectResult], config: PrepareConfig) -> None:
    for side in SPLITS:
        offered = sum(result.offered[side] for result in selected)
        if offered and not any(result.kept[side] for result in selected):
            reasons = add_counts(result.rejected for result in selected)
            found = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            remedy = "loosen the quality thresholds, change the balance weights, or use another tokenizer"
            if Reason.TOO_MANY_TOKENS in reasons:
                remedy = f"raise row_length = {config.row_length}: a conversation or pair must fit into one row"
            raise SourceError(f"none of {offered} {side} documents is left after selection ({found}); {remedy}")
    labels = labels_of(selected)
    if not config.has_labels:
        return
    if not 2 <= len(labels) <= MAX_LABELS:
        raise SourceError(
            f"the documents have {len(labels)} different labels ({_shown_names(labels)}), but 2 to {MAX_LABELS} are needed; check "
            "that records.label_field names the field with the labels"
        )
    for split, use in zip(SPLITS, ("training", "validation"), strict=True):
        if missing := [name for name, counts in labels.items() if not counts.get(split)]:
            logger.warning("no %s document has one of these labels: %s; add documents", use, _shown_names(missing))


def _shown_names(labels: Iterable[str]) -> str:
    names = list(labels)
    return ", ".join(map(repr, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "")

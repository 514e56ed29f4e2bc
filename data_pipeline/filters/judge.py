"""Extracts, cleans and judges a batch of documents: label, HTML, cleaning, length, language, form. The first failure decides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import BUILTIN, HeuristicConfig, Kind, PrepareConfig, RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.filters.clean import clean, judge_length
from data_pipeline.filters.html import PageReader
from data_pipeline.filters.language import CODE, UNDETERMINED, confidence_bin, identify
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.heuristics.statistics import TextStatistics
from data_pipeline.text import TextBatch

_JUDGED_BYTES = 4 << 20  # of a longer text, only this much is judged by its form: the rules need 30 to 90 bytes of memory per byte

MAX_LABEL_CHARS = 200  # longest name of a label, in characters


@dataclass(frozen=True, slots=True)
class JudgedDocument:
    document: Document
    language: str  # `code` for code; `und` if the language is unknown or was not identified


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    items: list[JudgedDocument | Rejection]  # one for each document of the batch, in the same order
    texts: TextBatch  # the cleaned texts of the documents that were kept, or were rejected for their form
    kept: NDArray[np.int64]  # the index in `texts` of each kept document, in order
    changes: dict[str, int]  # number of documents changed by each cleaning rule
    confidences: dict[str, dict[str, int]]  # identified documents by language and whole percent


def judge_batch(items: Sequence[Document | Rejection], config: PrepareConfig, pages: PageReader) -> JudgedBatch:
    """Clean and judge documents of one source, whose resolved settings are `config`. Rejections are returned as they are."""
    changes: Counter[str] = Counter()
    confidences: dict[str, Counter[str]] = {}
    judged: list[JudgedDocument | Rejection] = []
    texts: list[bytes] = []
    places: list[int] = []
    for place, item in enumerate(items):
        text, outcome = _judge_alone(item, config, pages, changes, confidences)
        judged.append(outcome)
        if isinstance(outcome, JudgedDocument):
            texts.append(text)
            places.append(place)
    batch = TextBatch(texts)
    left = [outcome for outcome in judged if isinstance(outcome, JudgedDocument)]
    shown = batch
    if max(map(len, texts), default=0) > _JUDGED_BYTES:
        shown = TextBatch([text[:_JUDGED_BYTES].decode(errors="ignore").encode() for text in texts])
    broken_rules = judge_form(shown, [d.document.kind for d in left], [d.language for d in left], config.heuristics)
    for place, one, broken in zip(places, left, broken_rules, strict=True):
        if broken is not None:
            judged[place] = Rejection.of(one.document, broken.reason, broken.detail)
    kept = np.array([number for number, broken in enumerate(broken_rules) if broken is None], np.int64)
    return JudgedBatch(judged, batch, kept, dict(changes), {language: dict(bins) for language, bins in confidences.items()})


def _judge_alone(
    item: Document | Rejection,
    config: PrepareConfig,
    pages: PageReader,
    changes: Counter[str],
    confidences: dict[str, Counter[str]],
) -> tuple[bytes, JudgedDocument | Rejection]:
    """Return a document's cleaned text as UTF-8, and the document or its rejection. Counts the changes and the confidence."""
    if isinstance(item, Rejection):
        return b"", item
    if rejection := judge_label(item, config.records):
        return b"", rejection
    document, names = _clean(item, config, pages)
    changes.update(names)
    if rejection := judge_length(document, config.clean):
        return b"", rejection
    text = document.text.encode()
    if document.kind == "code" or not config.language.identify:
        return text, JudgedDocument(document, CODE if document.kind == "code" else UNDETERMINED)
    found = identify(text, config.language)
    confidences.setdefault(found.language, Counter())[confidence_bin(found.confidence)] += 1
    settings = config.language
    if settings.keep and found.language not in settings.keep:
        reason, bound = Reason.LANGUAGE_UNWANTED, f"language.keep = {', '.join(settings.keep)}"
    elif settings.keep and found.confidence < settings.min_confidence:
        reason, bound = Reason.LANGUAGE_UNCERTAIN, f"language.min_confidence = {settings.min_confidence}"
    else:
        return text, JudgedDocument(document, found.language)
    return text, Rejection.of(document, reason, f"{found.language} with confidence {found.confidence:.2f}, {bound}")


def label_of(metadata: str, field: str) -> str:
    """Return the label in the metadata of a document, an empty string if there is none. A number is its JSON text."""
    fields: dict[str, Any] = json.loads(metadata) if metadata else {}
    value = fields.get(field, "")
    return value.strip() if isinstance(value, str) else json.dumps(value)


def judge_label(document: Document, records: RecordConfig) -> Rejection | None:
    if records.label_field is None:
        return None
    label = label_of(document.metadata, records.label_field)
    if not label:
        return Rejection.of(
            document, Reason.NO_LABEL, f"field {records.label_field!r} is missing or empty; see records.label_field"
        )
    is_name = len(label) <= MAX_LABEL_CHARS and label.isprintable()
    if not (label in records.labels if records.labels else is_name):
        shown = json.dumps(label[:MAX_LABEL_CHARS])
        return Rejection.of(document, Reason.UNKNOWN_LABEL, f"{shown} is not in records.labels, or is no name in one line")
    return None


def _clean(document: Document, config: PrepareConfig, pages: PageReader) -> tuple[Document, tuple[str, ...]]:
    if document.special:  # a conversation keeps the text that its template gives it
        return document, ()
    if document.parts:  # each is cleaned alone, so that the borders of the parts stay known
        *others, last = document.pieces
        pieces = [clean(piece, config.clean, document.kind, keep_end=True) for piece in others]
        pieces.append(clean(last, config.clean, document.kind))
        changes = dict.fromkeys(name for piece in pieces for name in piece.changes)
        parts = tuple(len(piece.text) for piece in pieces)
        return replace(document, text="".join(piece.text for piece in pieces), parts=parts), tuple(changes)
    if document.markup == "plain":
        cleaned = clean(document.text, config.clean, document.kind)
        return replace(document, text=cleaned.text), cleaned.changes
    extracted = pages.text_of(document.text, config.html)
    cleaned = clean(extracted.text, config.clean, document.kind)
    return replace(document, text=cleaned.text, markup="plain"), (extracted.rule, *cleaned.changes)


@contextmanager
def opened_cleaner(settings: Mapping[str, Any]) -> Iterator[Callable[[str], str]]:
    """Yield what cleans a text as a preparation did. `settings` are an entry of `cleaning_of`. ValueError: they are wrong."""
    config = PrepareConfig(sources=(BUILTIN,), clean=settings["clean"], html=settings["html"])
    form = Document("", "", 1, 0, settings["kind"], settings["markup"])
    with PageReader(config.limits) as pages:
        yield lambda text: _clean(replace(form, text=text), config, pages)[0].text


@dataclass(frozen=True, slots=True)
class BrokenRule:
    reason: Reason
    detail: str  # the measured value, and the setting that bounds it with its value


def judge_form(
    batch: TextBatch, kinds: Sequence[Kind], languages: Sequence[str], settings: HeuristicConfig
) -> list[BrokenRule | None]:
    """Return, for each text of the batch, the first rule of the chosen presets that it breaks; None if it breaks none."""
    broken: list[BrokenRule | None] = [None] * len(batch)
    is_code_D = np.array([kind == "code" for kind in kinds], np.bool_)
    texts = TextStatistics(batch, np.array([language == "en" for language in languages], np.bool_), settings)
    for preset in (PRESETS[name] for name in dict.fromkeys(settings.presets)):
        is_open_D = np.array([rule is None for rule in broken], np.bool_) & (is_code_D == preset.for_code)
        for rule in preset.rules:
            if not is_open_D.any():
                break
            values_D, bound = rule.measure(texts), rule.bound(settings)
            breaks_D = is_open_D & (values_D < bound if rule.is_least else values_D > bound)
            if rule.applies is not None:
                breaks_D &= rule.applies(texts)
            for number in np.flatnonzero(breaks_D):
                setting = rule.setting if rule.place is None else f"{rule.setting}[{rule.place}]"
                detail = f"{rule.what}: {values_D[number]:.4g}, heuristics.{setting} = {bound:.9g}"
                broken[number] = BrokenRule(Reason(rule.reason), detail)
            is_open_D &= ~breaks_D
    return broken

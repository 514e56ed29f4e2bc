"""Changes training documents, by the seed, the document's id and its text alone, not by batch or worker.

- Fill-in-the-middle (Bavarian et al. 2022), in code only. The text is cut at two characters drawn at random into prefix, middle
  and suffix, which are encoded separately. With the prefix first (PSM) the order is `<|fim_prefix|>` prefix `<|fim_suffix|>`
  suffix `<|fim_middle|>` middle. With the suffix first (SPM) it is `<|fim_prefix|>` `<|fim_suffix|>` suffix `<|fim_middle|>`
  prefix middle, the form of SPM that the paper trains together with PSM.
- Synonyms, in prose and web text: words from the user's list are replaced, in the same case.
- Subword regularization: BPE-dropout (Provilkov et al. 2020) or a sample of unigram segmentations (Kudo 2018).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from common.errors import ConfigError
from data_pipeline.config import FIM_TOKENS, AugmentConfig, Kind
from data_pipeline.execution.tasks import Counts
from data_pipeline.tokenizer import Encoded, SentencePieceTokenizer, Tokenizer

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")


class Augmenter:
    def __init__(self, tokenizer: Tokenizer, settings: AugmentConfig) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._synonyms = load_synonyms(settings.synonyms) if settings.synonyms is not None and settings.synonym_rate else {}
        ids = [tokenizer.token_id(name) for name in FIM_TOKENS] if settings.fim_rate else []
        if None in ids:
            raise ConfigError(
                f"augment.fim_rate = {settings.fim_rate}: the tokenizer has no token {FIM_TOKENS[ids.index(None)]}; "
                "add it to its file, or set fim_rate to 0"
            )
        self._fim_ids = {
            name: np.array([i], np.int32) for name, i in zip(("prefix", "middle", "suffix"), ids, strict=False) if i is not None
        }
        if settings.subword_rate and not isinstance(tokenizer, SentencePieceTokenizer):
            raise ConfigError(
                f"augment.subword_rate = {settings.subword_rate}: a {tokenizer.kind} tokenizer has one way to encode a text; "
                "use bpe or unigram, or set subword_rate to 0"
            )

    def encode(self, texts: Sequence[str], kinds: Sequence[Kind], document_ids: Sequence[int]) -> tuple[Encoded, Counts]:
        """Return ids without bos and eos, and the number of changes of each kind."""
        changes = [self._change(*document) for document in zip(texts, kinds, document_ids, strict=True)]
        plain = [segment for change in changes if change.subword_seed is None for segment in change.segments]
        encoded = iter(self._tokenizer.encode_flat(plain).arrays())
        documents = []
        for change in changes:
            if change.subword_seed is None:
                arrays = [next(encoded) for _ in change.segments]
            else:
                assert isinstance(self._tokenizer, SentencePieceTokenizer)
                sample, alpha = self._tokenizer.sample, self._settings.subword_alpha
                arrays = [sample(segment, alpha, change.subword_seed + place) for place, segment in enumerate(change.segments)]
            if change.fim is not None:
                prefix, middle, suffix = arrays
                begin, then, end = (self._fim_ids[name] for name in ("prefix", "suffix", "middle"))
                psm, spm = (begin, prefix, then, suffix, end, middle), (begin, then, suffix, end, prefix, middle)
                arrays = [np.concatenate(psm if change.fim == "psm" else spm)]
            documents.append(arrays[0])
        return Encoded.of(documents), {
            "fim_psm": sum(change.fim == "psm" for change in changes),
            "fim_spm": sum(change.fim == "spm" for change in changes),
            "synonym_documents": sum(change.num_synonyms > 0 for change in changes),
            "synonym_words": sum(change.num_synonyms for change in changes),
            "subword": sum(change.subword_seed is not None for change in changes),
        }

    def _change(self, text: str, kind: Kind, document_id: int) -> _Change:
        settings = self._settings
        digest = hashlib.blake2b(f"{settings.seed} {document_id}".encode(), digest_size=8).digest()
        draw = random.Random(int.from_bytes(digest, "big")).random  # the only method that is stable across versions of Python
        subword_seed = int(draw() * (1 << 31)) if draw() < settings.subword_rate else None
        if kind != "code":
            return _Change(*_with_synonyms(text, self._synonyms, settings.synonym_rate, draw), subword_seed=subword_seed)
        if draw() >= settings.fim_rate:
            return _Change((text,), subword_seed=subword_seed)
        order: Literal["psm", "spm"] = "spm" if draw() < settings.fim_spm_rate else "psm"
        first, second = sorted(int(draw() * (len(text) + 1)) for _ in range(2))
        return _Change((text[:first], text[first:second], text[second:]), fim=order, subword_seed=subword_seed)


@dataclass(frozen=True)
class _Change:
    segments: tuple[str, ...]  # one text; or prefix, middle and suffix for fill-in-the-middle
    num_synonyms: int = 0
    fim: Literal["psm", "spm"] | None = None
    subword_seed: int | None = None


def _with_synonyms(
    text: str, synonyms: Mapping[str, Sequence[str]], rate: float, draw: Callable[[], float]
) -> tuple[tuple[str], int]:
    if not synonyms:
        return (text,), 0
    num_replaced = 0

    def replacement(match: re.Match[str]) -> str:
        nonlocal num_replaced
        word = match[0]
        options = synonyms.get(word.lower())
        if options is None or (adapt := _case_of(word)) is None or draw() >= rate:
            return word
        num_replaced += 1
        return adapt(options[int(draw() * len(options))])

    return (_WORD.sub(replacement, text),), num_replaced


def _case_of(word: str) -> Callable[[str], str] | None:
    """Return a function that gives a word the case of `word`; None for mixed case such as `iPhone`, which is not replaced."""
    if word.islower():
        return str
    if word.isupper() and len(word) > 1:
        return str.upper
    if word[:1].isupper() and (len(word) == 1 or word[1:].islower()):
        return lambda other: other[:1].upper() + other[1:]
    return None


def load_synonyms(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            words = json.loads(content)
            if not isinstance(words, dict):
                raise ValueError("not a JSON object that maps words to lists of synonyms")
            listed = [(word, options if isinstance(options, list) else []) for word, options in words.items()]
            entries = [(f"entry {number}", *entry) for number, entry in enumerate(listed, 1)]
        else:
            lines = [(number, line.split("\t")) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
            entries = [(f"line {number}", word, options) for number, (word, *options) in lines]
    except OSError as error:
        raise ConfigError(f"augment.synonyms: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"augment.synonyms: {path}: {error}") from None
    synonyms: dict[str, tuple[str, ...]] = {}
    for place, word, options in entries:
        problem = None
        if not isinstance(word, str) or _WORD.fullmatch(word) is None:
            problem = f"{word!r} is not one word; only single words of letters are replaced"
        elif word.lower() in synonyms:
            problem = f"{word!r} is listed twice; list all its synonyms in one entry"
        elif not options or not all(
            isinstance(option, str) and option.strip() == option != "" and option.isprintable() for option in options
        ):
            problem = f"{word!r} needs at least one synonym, each without spaces around it"
        if problem:
            raise ConfigError(f"augment.synonyms: {path}, {place}: {problem}")
        synonyms[word.lower()] = tuple(options)
    return synonyms

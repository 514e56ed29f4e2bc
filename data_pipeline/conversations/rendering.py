"""Turns conversations into text with marked parts, by a chat template that runs in a confined process, and this text into ids.

Text of a conversation that spells a special token must not become this token. So each such name is replaced by an unused character
before the template runs, and put back afterwards: what then still spells a special token comes from the template.

Shape suffix: T ids of one document.
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

import json
import re
import signal
import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.conversations.messages import Message, MessagesError, read_chat
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.execution.confined import ConfinedProgram, ProgramOnDemand, refuse_lower_limits
from data_pipeline.tokenizer import Tokenizer

_CHILD = Path(__file__).with_name("template_child.py")
_SILENCE_S = 600.0  # wall time; the child's own limit is processor time, which a busy machine does not change
_SECONDS = 5  # a conversation takes less than a millisecond
_MEMORY_BYTES = 256 << 20
_MAX_ANSWER_BYTES = 128 << 20
_FIRST_PRIVATE = 0xF0000  # private characters, of which a conversation rarely contains one
_ENDED_BY_THE_TEMPLATE = (0, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGXCPU)
_JSON_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+')
_USER, _ANSWER = "How are you?", "I am well."


@dataclass(frozen=True)
class Rendered:
    text: str
    parts: tuple[int, ...]  # of its parts in characters, alternately without and with a loss
    special: tuple[int, ...]  # of its pieces in characters, alternately ordinary text and a special token

    @staticmethod
    def join(all_rendered: Sequence[Rendered]) -> Rendered:
        return Rendered(
            "".join(one.text for one in all_rendered),
            _joined([one.parts for one in all_rendered]),
            _joined([one.special for one in all_rendered]),
        )

    def of_last_answer(self) -> Rendered:
        """Return the text up to the end of the last answer, the only one with a loss then."""
        ends = list(accumulate(self.parts))
        last = len(ends) // 2 * 2 - 1  # parts with an odd number have a loss
        start, end = ends[last - 1], ends[last]
        borders = [min(border, end) for border in accumulate(self.special, initial=0)]
        kept = [after - before for before, after in pairwise(borders)]
        num_needed = max((number for number, length in enumerate(kept, 1) if length), default=0)
        return Rendered(self.text[:end], (start, end - start), tuple(kept[:num_needed]))

    def pieces(self) -> list[tuple[str, bool]]:
        return [
            (self.text[start:end], number % 2 == 1)
            for number, (start, end) in enumerate(pairwise(accumulate(self.special, initial=0)))
            if end > start
        ]


class ChatRenderer(ProgramOnDemand):
    """Renders conversations. Its process starts with the first one, in about 0.1 s, and ends with `close`."""

    def __init__(self, template: ChatTemplate) -> None:
        limits = {"seconds": _SECONDS, "memory_bytes": _MEMORY_BYTES}
        setup = {"template": template.source, "variables": dict(template.variables), **limits}
        super().__init__(_CHILD, _SILENCE_S, _message(setup))
        self._template = template

    def document(self, document: Document, max_depth: int) -> Document | Rejection:
        try:
            found = [self.conversation(messages) for messages in read_chat(document.text, max_depth)]
            rendered = found[0] if len(found) == 1 else Rendered.join([one.of_last_answer() for one in found])
        except MessagesError as error:
            return Rejection.of_bytes(error.reason, document.path, document.line, document.text.encode(), str(error))
        return replace(document, text=rendered.text, markup="plain", parts=rendered.parts, special=rendered.special)

    def conversation(self, messages: Sequence[Message]) -> Rendered:
        """Return the text of a conversation. Its parts with a loss are the answers with their end of turn."""
        return self._rendered(messages, prompt=False)

    def prompt(self, messages: Sequence[Message]) -> Rendered:
        return self._rendered(messages, prompt=True)

    def end_of_turn(self) -> tuple[str, bool]:
        """Return the text that ends an answer, and whether it is a special token."""
        messages = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}]
        try:
            rendered = self.conversation(messages)
        except MessagesError as error:
            raise ConfigError(f"the chat template cannot be used: {error}") from None
        ends = list(accumulate(rendered.parts))
        answer = rendered.text[ends[0] : ends[1]]
        end = answer.partition(_ANSWER)[2]
        if found := self._template.special_in(end):
            return end[slice(*found[0])].strip() or end[slice(*found[0])], True
        if not end:
            raise ConfigError("the chat template marks no end of an answer; use a template that ends each answer with a token")
        return end, False

    def _rendered(self, messages: Sequence[Message], *, prompt: bool) -> Rendered:
        content = json.dumps(messages, ensure_ascii=False)
        used = set(content) | set(self._template.source)
        free = (character for number in range(_FIRST_PRIVATE, 0x110000) if (character := chr(number)) not in used)
        place_of: dict[str, str] = {}

        def next_free() -> str:
            if (character := next(free, None)) is None:
                raise MessagesError(Reason.TEMPLATE_REFUSED, "it has so many private characters that none is left as a mark")
            return character

        def with_places(found: re.Match[str]) -> str:
            text, pieces, end = json.loads(found[0]), [], 0
            for start, name in self._template.names_in(text):
                if name not in place_of:
                    place_of[name] = next_free()
                pieces += [text[end:start], place_of[name]]
                end = start + len(name)
            return json.dumps("".join((*pieces, text[end:])))

        marks = next_free() + next_free()
        safe = json.loads(_JSON_TEXT.sub(with_places, content))
        answer = self._asked({"messages": safe, "marks": marks, "prompt": prompt})
        if "refused" in answer:
            raise MessagesError(Reason.TEMPLATE_REFUSED, answer["refused"])
        if any("\ud800" <= character <= "\udfff" for character in answer["text"]):
            raise MessagesError(Reason.TEMPLATE_REFUSED, "the text of the template contains a lone surrogate")
        text: str = answer["text"]
        spans: list[list[int]] = answer["spans"]
        if not prompt and not any(end > start for start, end in spans):
            raise MessagesError(Reason.TEMPLATE_REFUSED, "the text of the template has no answer")
        special = self._template.special_in(text)
        names = {ord(place): name for name, place in place_of.items()}

        def outside(border: int) -> int:
            # The end of the special token that a border cuts: a token can take white space that is not part of an answer.
            number = bisect_left(special, (border, 0)) - 1
            return max(border, special[number][1]) if number >= 0 else border

        whole = [[outside(border) for border in span] for span in spans]
        return Rendered(text.translate(names), _lengths(text, whole, names), _lengths(text, special, names))

    def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        def render(program: ConfinedProgram) -> dict[str, Any]:
            program.write(_message(request))
            [length] = struct.unpack("<q", program.read(8))
            if not 0 <= length <= _MAX_ANSWER_BYTES:
                self.close()
                return {"refused": f"the text of the template has more than {_MAX_ANSWER_BYTES} bytes"}
            answer: dict[str, Any] = json.loads(program.read(length))
            return answer

        answer = self.ask(render, "renders chat templates", _ENDED_BY_THE_TEMPLATE)
        if answer is None:
            refuse_lower_limits(_MEMORY_BYTES, _SECONDS)
        return answer or {"refused": f"the template takes more than {_SECONDS} s of processor time, or too much memory"}


def _message(value: dict[str, Any]) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack("<q", len(data)) + data


def _lengths(text: str, spans: Sequence[Sequence[int]], names: Mapping[int, str]) -> tuple[int, ...]:
    """Return the lengths of the texts between the spans and in them, alternately, after the placeholders are replaced."""
    borders = [0, *(border for span in spans for border in span), len(text)]
    return tuple(len(text[start:end].translate(names)) for start, end in pairwise(borders))


def _joined(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return alternating lengths of several texts, one after the other."""
    joined: list[int] = []
    for lengths in lists:
        if len(joined) % 2 and lengths:  # the last length and the first one are of the same sort
            joined[-1] += lengths[0]
            joined += lengths[1:]
        else:
            joined += lengths
    return tuple(joined)


@dataclass(frozen=True)
class EncodedChat:
    ids_T: NDArray[np.int32]
    has_loss_T: NDArray[np.bool_]

    @staticmethod
    def nothing() -> EncodedChat:
        return EncodedChat(np.empty(0, np.int32), np.empty(0, np.bool_))

    @property
    def num_answers(self) -> int:
        """Number of answers that follow a token without a loss."""
        return int((~self.has_loss_T[:-1] & self.has_loss_T[1:]).sum())

    def fitted(self, row_length: int, *, may_cut: bool) -> EncodedChat | None:
        """Return what fits into a row; None if that is nothing to train on, or if it does not fit and must not be cut."""
        if len(self.ids_T) <= row_length:
            return self
        cut = EncodedChat(self.ids_T[:row_length], self.has_loss_T[:row_length])
        return cut if may_cut and cut.has_loss_T[1:].any() else None


def encode_chats(
    tokenizer: Tokenizer, texts: Sequence[str], parts: Sequence[Sequence[int]], special: Sequence[Sequence[int]]
) -> list[EncodedChat]:
    """Encode each part alone, so that no token has text of two parts and a model continues the same tokens."""
    pieces = [_pieces(*one) for one in zip(texts, parts, special, strict=True)]
    ids = iter(_encode(tokenizer, [piece[:2] for one in pieces for piece in one]))
    encoded = []
    for one in pieces:
        arrays = [next(ids) for _ in one]
        has_loss_T = np.repeat([piece.has_loss for piece in one], [len(array) for array in arrays])
        encoded.append(EncodedChat(np.concatenate(arrays), has_loss_T.astype(np.bool_)))
    return encoded


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> list[int]:
    return [number for array in _encode(tokenizer, pieces) for number in array.tolist()]


class _Piece(NamedTuple):
    text: str
    is_special: bool
    has_loss: bool


def _pieces(text: str, parts: Sequence[int], special: Sequence[int]) -> list[_Piece]:
    """Return the longest pieces of a text that are all of one sort: special token or not, with a loss or not."""
    loss_ends, special_ends = list(accumulate(parts)), list(accumulate(special))
    borders = sorted({0, *loss_ends, *special_ends})
    # A piece that begins at a border belongs to the first part that ends behind it.
    loss_at, special_at = (np.searchsorted(ends, borders[:-1], side="right").tolist() for ends in (loss_ends, special_ends))
    return [
        _Piece(text[start:end], place % 2 == 1, part % 2 == 1)
        for (start, end), part, place in zip(pairwise(borders), loss_at, special_at, strict=True)
    ]


def _encode(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> list[NDArray[np.int32]]:
    tokens = tokenizer.named_tokens
    # Also by the name without the white space around it, because a piece may have other white space.
    ids = {token.name.strip(): token.id for token in tokens} | {token.name: token.id for token in tokens}
    arrays = tokenizer.encode_arrays(["" if is_special else text for text, is_special in pieces])
    return [
        np.array([ids[text if text in ids else text.strip()]], np.int32) if is_special else array
        for (text, is_special), array in zip(pieces, arrays, strict=True)
    ]

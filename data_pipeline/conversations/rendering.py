"""Turns conversations into text with marked parts, by a chat template that runs in a confined process, and this text into ids.

Text of a conversation that spells a special token must not become this token. So each such name is replaced by an unused character
before the template runs, and put back afterwards: what then still spells a special token comes from the template.

Shape suffix: T ids of one document.
"""

from __future__ import annotations

import json
import re
import signal
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.text import named_values
from data_pipeline.config import ChatConfig
from data_pipeline.config.text import REASONING
from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.conversations.messages import Conversation, Message, MessagesError, read_chat
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.execution.confined import ConfinedProgram, ProgramOnDemand, refuse_lower_limits
from data_pipeline.tokenizer import Tokenizer

Ids = NDArray[np.int32]
_Path = tuple[str | int, ...]  # of a value in `messages` and `arguments`

_CHILD = Path(__file__).with_name("template_child.py")
_SILENCE_S = 600.0  # wall time; the child's own limit is processor time, which a busy machine does not change
_SECONDS = 5  # a conversation takes less than a millisecond
_MEMORY_BYTES = 256 << 20
_MAX_ANSWER_BYTES = 128 << 20
_FIRST_PRIVATE = 0xF0000  # private characters, of which a conversation rarely contains one
_ENDED_BY_THE_TEMPLATE = (0, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGXCPU)
_JSON_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+')
_USER, _ANSWER = "How are you?", "I am well."
_PARTS_OF_FUNCTIONS = ("name", "arguments", "description", "parameters")
_MOST_TRIES = 20  # of a field that a template has never used; afterwards it is counted unseen
_NEEDED = ("content", "tool_calls", "tools", "documents")
"""Fields without which a conversation says something else. The loss of others, such as reasoning and ids, is counted."""


def _needs_date(source: str) -> bool:
    return re.search(r"\bstrftime_now\s*\(", source) is not None and not re.search(r"\bstrftime_now\s+is\b", source)


class _Field(NamedTuple):
    name: str  # with the role of its message
    situation: tuple[object, ...]  # of its message


@dataclass(frozen=True)
class Rendered:
    text: str
    parts: tuple[int, ...]  # of its parts in characters, alternately without and with a loss
    special: tuple[int, ...]  # of its pieces in characters, alternately ordinary text and a special token

    @staticmethod
    def join(first: Rendered, second: Rendered) -> Rendered:
        """Return one text after the other. No token extends over the border."""
        border = (0,) if len(first.special) % 2 else ()
        return Rendered(first.text + second.text, first.parts + second.parts, first.special + border + second.special)

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
    """Renders conversations. Its process starts with the first one, in about 0.1 s, and ends with `close`.

    Without `chat`, for conversations that become no data, a template that cannot do without the date gets today's.
    """

    def __init__(self, template: ChatTemplate, chat: ChatConfig | None = None) -> None:
        limits = {"seconds": _SECONDS, "memory_bytes": _MEMORY_BYTES}
        today = {"strftime_now": date.today().isoformat()} if chat is None and _needs_date(template.source) else {}
        setup = {"template": template.source, "variables": {**template.variables, **today}, **limits}
        super().__init__(_CHILD, _SILENCE_S, _message(setup))
        self._template = template
        self._chat = chat or ChatConfig()
        self.unused: Counter[str] = Counter()
        """Conversations by the fields that the template leaves out."""
        self._used: set[_Field] = set()
        self._tries: Counter[_Field] = Counter()

    def documents(self, document: Document, max_depth: int, names: Mapping[str, str] | None = None) -> list[Document | Rejection]:
        """Return the text of a record. It is several texts if the template shows earlier answers in another way than the last.

        `names`: those of its fields in the input.
        """
        try:
            found, lost = read_chat(document.text, max_depth, names), set[str]()
            if len(found) == 1:
                all_rendered = self._examples(found[0] if self._chat.answers == "all" else found[0].only_last(), lost)
            else:
                pair = [self._examples(one, lost)[-1].of_last_answer() for one in found]
                if pair[0] == pair[1]:
                    raise MessagesError(Reason.EQUAL_PAIR, "chosen and rejected are the same in the text of the template")
                all_rendered = [Rendered.join(*pair)]
            self.unused.update(lost)
        except MessagesError as error:
            return [Rejection.of_bytes(error.reason, document.path, document.line, document.text.encode(), str(error))]
        return [replace(document, text=one.text, markup="plain", parts=one.parts, special=one.special) for one in all_rendered]

    def conversation(self, messages: Sequence[Message]) -> Rendered:
        """Return the text of a conversation up to its last answer. Its parts with a loss are the answers with their end of turn."""
        answers = tuple(place for place, message in enumerate(messages) if message["role"] == "assistant")
        return self._rendered(Conversation(list(messages), answers, {}))[0][-1]

    def prompt(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None) -> Rendered:
        return self._rendered(Conversation(list(messages), (), arguments or {}))[0][0]

    def _examples(self, conversation: Conversation, names_lost: set[str]) -> list[Rendered]:
        """Check that the template uses what the conversation has. A field that it has used once is not tried again.

        `names_lost` gets the names of the fields that it does not use.
        """
        conversation = replace(conversation, arguments={**named_values(self._chat.arguments), **conversation.arguments})
        places: dict[_Field, list[_Path]] = {}
        needed: set[_Field] = set()

        def add(label: str, path: _Path, value: Any, situation: Sequence[object] = (), *, is_needed: bool) -> None:
            for more, place in _parts_of(path, value):
                field = _Field(label + more, tuple(situation))
                places.setdefault(field, []).append(place)
                needed.update([field] if is_needed else [])

        for name, value in conversation.arguments.items():
            add(name, ("arguments", name), value, is_needed=name in _NEEDED)
        last_user = max((place for place, one in enumerate(conversation.messages) if one["role"] == "user"), default=0)
        for place, message in enumerate(conversation.messages[: conversation.trained[-1] + 1]):  # what follows is in no example
            beside = tuple(name for name in ("tool_calls", *REASONING) if message.get(name))
            is_empty = not message["content"].strip() and "tool_calls" not in beside  # then its reasoning is all that it has
            for name, value in message.items():
                if name != "role" and value not in ("", [], {}):
                    is_needed = name in _NEEDED or (is_empty and name in REASONING)
                    situation = (place < last_user, place == 0, beside)
                    add(f"{message['role']}.{name}", ("messages", place, name), value, situation, is_needed=is_needed)
        asked = [field for field in places if field not in self._used and self._tries[field] < _MOST_TRIES]
        probes = [(field, path) for field in asked for path in dict.fromkeys((places[field][0], places[field][-1]))]
        rendered, unused = self._rendered(conversation, [path for _, path in probes])
        self._used |= {field for place, (field, _) in enumerate(probes) if place not in unused}
        lost = {field for field in places if field not in self._used}
        poorer = lost & needed
        if poorer and self._chat.unused_fields == "reject":
            names = ", ".join(sorted({field.name for field in poorer}))
            raise MessagesError(
                Reason.UNUSED_FIELD,
                f"the chat template leaves out {names}; use a template that writes it, remove it from the record, or set "
                "chat.unused_fields to keep",
            )
        self._tries.update(lost - poorer)
        names_lost.update(field.name for field in lost)
        return rendered

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

    def added_to_prompts(self) -> str:
        """Return what the template writes before an answer that is to come, and not before one that is there."""
        messages = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}]
        answered, prompt = self.conversation(messages), self.prompt(messages[:1]).text
        return "" if answered.text.startswith(prompt) else prompt[answered.parts[0] :]

    def _rendered(self, conversation: Conversation, probes: Sequence[Sequence[Any]] = ()) -> tuple[list[Rendered], set[int]]:
        """Return the examples, and the places of the probes whose values the template does not use."""
        content = json.dumps([conversation.messages, dict(conversation.arguments)], ensure_ascii=False)
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
        messages, arguments = json.loads(_JSON_TEXT.sub(with_places, content))
        request = {"messages": messages, "arguments": arguments, "marks": marks}
        answer = self._asked(request | {"trained": conversation.trained, "probes": list(map(list, probes))})
        if "refused" in answer:
            raise MessagesError(Reason.TEMPLATE_REFUSED, answer["refused"])
        names = {ord(place): name for name, place in place_of.items()}
        rendered = [self._example(one["text"], one["spans"], names) for one in answer["examples"]]
        if conversation.trained and not all(any(one.parts[1::2]) for one in rendered):
            raise MessagesError(Reason.TEMPLATE_REFUSED, "the text of the template has no answer")
        return rendered, set(answer["unused"])

    def _example(self, text: str, spans: Sequence[Sequence[int]], names: Mapping[int, str]) -> Rendered:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise MessagesError(Reason.TEMPLATE_REFUSED, "the text of the template contains a lone surrogate")
        special = self._template.special_in(text)

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


def _parts_of(path: _Path, value: Any) -> Iterator[tuple[str, _Path]]:
    """Yield what a template may use alone, each with its name and path: the whole, or the parts of the first and last function."""
    numbered = [*enumerate(value)] if path[-1] in ("tool_calls", "tools") and isinstance(value, list) else []
    if not numbered or not all(isinstance(one, dict) for _, one in numbered):
        yield "", path
        return
    for number, one in dict((numbered[0], numbered[-1])).items():
        inner: _Path = ("function",) if isinstance(one.get("function"), dict) else ()
        function = one["function"] if inner else one
        for name in _PARTS_OF_FUNCTIONS:
            if function.get(name) not in (None, "", [], {}):
                yield f".{name}", (*path, number, *inner, name)


def _message(value: dict[str, Any]) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack("<q", len(data)) + data


def _lengths(text: str, spans: Sequence[Sequence[int]], names: Mapping[int, str]) -> tuple[int, ...]:
    """Return the lengths of the texts between the spans and in them, alternately, after the placeholders are replaced."""
    borders = [0, *(border for span in spans for border in span), len(text)]
    return tuple(len(text[start:end].translate(names)) for start, end in pairwise(borders))


@dataclass(frozen=True)
class EncodedChat:
    ids_T: NDArray[np.int32]
    has_loss_T: NDArray[np.bool_]

    @staticmethod
    def nothing() -> EncodedChat:
        return EncodedChat(np.empty(0, np.int32), np.empty(0, np.bool_))

    @staticmethod
    def join(pieces: Sequence[tuple[Ids, NDArray[np.bool_]]]) -> EncodedChat:
        ids, has_loss = zip(*pieces, strict=True)
        return EncodedChat(np.concatenate(ids), np.concatenate(has_loss))

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
    """Encode the text between two special tokens as a whole, as other programs do. A token has a loss if it begins in an answer."""
    all_pieces = [_pieces(*one) for one in zip(texts, parts, special, strict=True)]
    flat = [piece for pieces in all_pieces for piece in pieces]
    alone = [piece.alone() if len(piece.ends) > 1 else [] for piece in flat]
    of_parts = iter(_encode(tokenizer, [part for some in alone for part in some]))
    found = iter(
        (ids_T, _losses(tokenizer, piece, ids_T, list(islice(of_parts, len(some)))))
        for piece, ids_T, some in zip(flat, _encode(tokenizer, flat), alone, strict=True)
    )
    return [EncodedChat.join(list(islice(found, len(pieces)))) for pieces in all_pieces]


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> list[int]:
    """Return the ids of a text: pieces in their order, each with whether it is a special token."""
    all_pieces = [_Piece(text, is_special, number == 0, False, (len(text),)) for number, (text, is_special) in enumerate(pieces)]
    return [number for array in _encode(tokenizer, all_pieces) for number in array.tolist()]


class _Piece(NamedTuple):
    text: str
    is_special: bool
    is_first: bool  # of its text
    begins_with_loss: bool
    ends: tuple[int, ...]  # of its parts in characters, alternately without and with a loss, or the other way round

    def alone(self) -> list[_Piece]:
        return [
            _Piece(self.text[start:end], False, self.is_first and not start, False, (end - start,))
            for start, end in pairwise((0, *self.ends))
        ]


def _pieces(text: str, parts: Sequence[int], special: Sequence[int]) -> list[_Piece]:
    """Return special tokens, and the texts between them."""
    loss_ends, special_ends = list(accumulate(parts)), list(accumulate(special))
    found = []
    for place, (start, end) in enumerate(pairwise((0, *special_ends))):
        if start == end:
            continue
        first = bisect_right(loss_ends, start)  # the part that ends behind the start
        inside = sorted({one - start for one in loss_ends[first : bisect_left(loss_ends, end)]})
        found.append(_Piece(text[start:end], place % 2 == 1, start == 0, first % 2 == 1, (*inside, end - start)))
    return found


def _losses(tokenizer: Tokenizer, piece: _Piece, ids_T: Ids, of_parts: Sequence[Ids]) -> NDArray[np.bool_]:
    """Return which tokens of a piece have a loss. `of_parts` has the ids of its parts, each encoded alone, if there are several."""
    counts = list(map(len, of_parts)) or [len(ids_T)]
    if of_parts and not np.array_equal(np.concatenate(of_parts), ids_T):  # a token extends over a border
        starts = tokenizer.token_starts(piece.text, is_first=piece.is_first) or []
        if len(starts) != len(ids_T):
            starts = [len(tokenizer.decode(ids_T[:number].tolist())) for number in range(len(ids_T))]
        counts = np.diff([0, *(bisect_left(starts, end) for end in piece.ends[:-1]), len(ids_T)]).tolist()
    return np.repeat([piece.begins_with_loss ^ bool(number % 2) for number in range(len(counts))], counts).astype(np.bool_)


def _encode(tokenizer: Tokenizer, pieces: Sequence[_Piece]) -> list[Ids]:
    tokens = tokenizer.named_tokens
    # Also by the name without the white space around it, because a piece may have other white space.
    ids = {token.name.strip(): token.id for token in tokens} | {token.name: token.id for token in tokens}
    first = iter(tokenizer.encode_arrays([piece.text for piece in pieces if piece.is_first and not piece.is_special]))
    inside = iter(tokenizer.encode_inside([piece.text for piece in pieces if not piece.is_first and not piece.is_special]))
    arrays = []
    for piece in pieces:
        if piece.is_special:
            arrays.append(np.array([ids[piece.text if piece.text in ids else piece.text.strip()]], np.int32))
        else:
            arrays.append(next(first if piece.is_first else inside))
    return arrays

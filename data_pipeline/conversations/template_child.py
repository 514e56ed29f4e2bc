"""Renders conversations with a chat template in a separate process. `rendering` starts this file as a script.

A template may come from a stranger, and Jinja's sandbox stops no endless loops or huge texts. So each conversation has limits.

The template gets what transformers gives it. `strftime_now` writes the day that is given under this name, if any, because data
must not differ from day to day. A block `{% generation %}` puts a mark before and after its text, from which the parent learns
which text is the answer.

Messages in both directions are a 64-bit length, little-endian, and a JSON object of that length. The first message has
`template`, `variables`, `seconds` and `memory_bytes`. Each later one has `messages`, `arguments` of the template, `marks` (two
characters that the conversation does not contain), `trained` (places of the answers with a loss; none: only the text before the
next answer is needed) and `probes` (paths of values in `messages` and `arguments`). The answers are:

    {"examples": [{"text": …, "spans": [[start, end], …]}, …], "unused": […]}
        The text, and in it the part of each answer with a loss. A template that shows earlier answers in another way than the last
        one, as Qwen3's, gives an example for each answer. `unused` has the places of the probes whose values change no text.
    {"refused": …}
        The template cannot be used for this conversation.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from bisect import bisect_left
from datetime import date
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from common.child_process import SoftLimit, forbid_files, limit_memory

_SHOWN_CHARS = 200
_SHORT = 24  # messages of a conversation in which it is faster to render all before each answer
_REASONING = ("reasoning_content", "thinking", "reasoning")
_GROUP = 4  # messages that are rendered together at least


class _Refused(Exception):  # noqa: N818 - an outcome of rendering, not a fault
    """The template cannot be used for a conversation."""


def main() -> None:
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    forbid_files()
    processor_time = SoftLimit(resource.RLIMIT_CPU)
    setup = _read(source)
    assert setup is not None
    limit_memory(setup["memory_bytes"])
    processor_time.set_seconds(setup["seconds"])
    template: jinja2.Template | str
    try:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "dict": _Dict()}
        template = environment.from_string(setup["template"])
    except (jinja2.TemplateError, RecursionError) as error:
        template = f"the template is not valid: {_shown(error)}"
    while (request := _read(source)) is not None:
        processor_time.set_seconds(setup["seconds"])
        answer: dict[str, Any]
        try:
            if isinstance(template, str):
                raise _Refused(template)
            answer = _answer(template, setup["variables"], request)
        except _Refused as error:
            answer = {"refused": str(error)}
        except MemoryError:
            return  # the parent tries again with a fresh process
        except Exception as error:  # the template may be hostile, so any error is possible
            answer = {"refused": _shown(error)}
        data = json.dumps(answer).encode()
        sink.write(struct.pack("<q", len(data)) + data)
        sink.flush()


def _read(source: Any) -> dict[str, Any] | None:
    header = source.read(8)
    if len(header) < 8:
        return None
    request: dict[str, Any] = json.loads(source.read(struct.unpack("<q", header)[0]))
    return request


def _answer(template: jinja2.Template, variables: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    messages, arguments, marks, trained = (request[name] for name in ("messages", "arguments", "marks", "trained"))
    usual = {"tools": None, "documents": None} | variables

    def render(number: int, *, prompt: bool = False, shown: list[Any] = messages, given: dict[str, Any] = arguments) -> str:
        values = usual | given | {"messages": _with_reasoning(shown[:number]), "add_generation_prompt": prompt, "_marks": marks}
        if (day := values.get("strftime_now")) is not None:
            values["strftime_now"] = lambda form: date.fromisoformat(day).strftime(form)
        return str(template.render(values))

    if not trained:
        text = render(len(messages), prompt=True)
        return {"examples": [{"text": text.replace(marks[0], "").replace(marks[1], ""), "spans": []}], "unused": []}
    ends = [len(messages)]
    whole = render(len(messages))
    if marks[0] in whole:
        examples = [_marked(whole, marks, messages, trained)]
    elif (spans := _spans_by_turns(render, whole, messages, trained)) is not None:
        examples = [{"text": whole, "spans": spans}]
    else:
        texts = [(_before_answer(render, number, messages, marks[0]), render(number + 1), messages[number]) for number in trained]
        if all(whole.startswith(text) for _, text, _ in texts):
            examples = [{"text": whole, "spans": [_span(*one) for one in texts]}]
        else:
            ends = [number + 1 for number in trained]
            examples = [{"text": one[1], "spans": [_span(*one)]} for one in texts]
    texts_before = [render(end) for end in ends] if request["probes"] else []

    def has_effect(path: list[Any]) -> bool:
        shown, given = (
            _changed(value, path[1:]) if path[0] == name else value
            for name, value in (("messages", messages), ("arguments", arguments))
        )
        try:
            return any(render(end, shown=shown, given=given) != text for end, text in zip(ends, texts_before, strict=True))
        except Exception:  # the template refuses the other value, so it reads it
            return True

    return {"examples": examples, "unused": [place for place, path in enumerate(request["probes"]) if not has_effect(path)]}


def _with_reasoning(messages: list[Any]) -> list[Any]:
    """Return messages whose reasoning has all names by which templates ask for it, as transformers gives them."""
    found = [next((one[name] for name in _REASONING if one.get(name) is not None), None) for one in messages]
    return [
        one if reasoning is None else {"thinking": reasoning, **one, "reasoning_content": reasoning}
        for one, reasoning in zip(messages, found, strict=True)
    ]


def _before_answer(render: Any, number: int, messages: list[Any], mark: str) -> str:
    """Return the text before an answer: its prompt, or the part of it that stands before each answer.

    The prompts of DeepSeek-R1, QwQ and Gemma 4 go on with the beginning of a reasoning, which the text of an answer may not have.
    """
    prompt, text = render(number, prompt=True), render(number + 1)
    if not text.startswith(prompt):
        before, plain = render(number), [*messages[:number], {"role": "assistant", "content": mark}]
        header = str(render(number + 1, shown=plain)).partition(mark)[0]
        if before != header and header.startswith(before) and prompt.startswith(header) and text.startswith(header):
            return header
    return str(prompt)


def _spans_by_turns(render: Any, whole: str, messages: list[Any], trained: list[int]) -> list[list[int]] | None:
    """Return the part of each answer in the text of a long conversation; None if only the text before each answer can tell it.

    A few messages are rendered behind the few before them, so the time is proportional to the number of messages. What each group
    adds must be the whole text together, and the texts before two of the answers must be its beginning.
    """
    if len(messages) <= _SHORT:
        return None
    first = next((place for place, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0)
    starts = [first]
    for place in range(first, len(messages)):
        role, before = messages[place]["role"], messages[place - 1]["role"]
        if place - starts[-1] >= _GROUP and (role == "user" or (role == "assistant" and before == "tool")):
            starts.append(place)
    spans: list[list[int]] = []
    pieces: list[str] = []
    length, head, user = 0, messages[:first], None
    shown_before: list[Any] = []
    try:
        for start, end in pairwise([*starts, len(messages)]):
            context = head + shown_before
            before = render(len(context), shown=context) if shown_before else ""
            group = context + messages[start:end]
            text = render(len(group), shown=group)
            if not text.startswith(before):
                return None
            for place in trained[bisect_left(trained, start) : bisect_left(trained, end)]:
                number = len(context) + place - start
                prompt, answered = render(number, shown=group, prompt=True), render(number + 1, shown=group)
                if not (prompt.startswith(before) and text.startswith(answered)):
                    return None
                spans.append([length - len(before) + border for border in _span(prompt, answered, messages[place])])
            pieces.append(text[len(before) :])
            length += len(pieces[-1])
            shown_before = messages[start:end]
            if shown_before[0]["role"] != "user":
                shown_before = [*([] if user is None else [user]), *shown_before]
            user = next((one for one in reversed(shown_before) if one["role"] == "user"), None)
    except MemoryError:
        raise
    except Exception:  # the template refuses a part of the conversation
        return None
    tried = {number: trained[number] for number in (len(trained) // 2, len(trained) - 1)}
    if "".join(pieces) != whole or any(render(end, prompt=True) != whole[: spans[one][0]] for one, end in tried.items()):
        return None
    return spans


def _changed(value: Any, path: list[Any]) -> Any:
    """Return a copy with other texts and numbers below a path."""
    if path:
        copy = value.copy()
        copy[path[0]] = _changed(value[path[0]], path[1:])
        return copy
    if isinstance(value, dict):
        return {name: _changed(one, []) for name, one in value.items()}
    if isinstance(value, list):
        return [_changed(one, []) for one in value]
    return not value if isinstance(value, bool) or value is None else f"{value}x" if isinstance(value, str) else value + 1


def _marked(whole: str, marks: str, messages: list[Any], trained: list[int]) -> dict[str, Any]:
    """Return the text without its marks. Each block is an answer, unless the template has other blocks than answers."""
    spans, pieces, length = [], [], 0
    for number, piece in enumerate(whole.replace(marks[1], marks[0]).split(marks[0])):
        if number % 2:
            spans.append([length, length + len(piece)])
        pieces.append(piece)
        length += len(piece)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if trained != answers:
        if len(spans) != len(answers):
            raise _Refused(
                f"the template marks {len(spans)} answers of {len(answers)}, so it is unknown which have a loss; use a "
                "template with one {% generation %} block for each answer"
            )
        spans = [span for number, span in zip(answers, spans, strict=True) if number in trained]
    return {"text": "".join(pieces), "spans": spans}


def _span(before: str, after: str, message: dict[str, Any]) -> list[int]:
    """Return start and end of an answer with its end of turn, from the text before the answer and that up to its end."""
    if not after.startswith(before):
        place = _num_common(before, after)
        raise _Refused(
            f"the prompt of an answer ends with {before[place:][:40]!r}, but the text with the answer continues with "
            f"{after[place:][:40]!r} there; use a template whose prompt is the beginning of the text, or one with "
            "{% generation %} blocks"
        )
    answer = after[len(before) :]
    content = str(message.get("content") or "").rstrip()
    trimmed = answer.rstrip()
    # White space after the end of a turn belongs to the template. It is the end of the turn only if nothing else is.
    return [len(before), len(before) + len(answer if trimmed.endswith(content) and content else trimmed)]


def _num_common(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = jinja2.nodes.Name("_marks", "load")
        return jinja2.nodes.CallBlock(self.call_method("_marked", [marks]), [], [], body).set_lineno(line)

    def _marked(self, marks: str, caller: jinja2.runtime.Macro) -> str:
        return f"{marks[0]}{caller()}{marks[1]}"


class _Dict:
    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise _Refused(f"the template refuses the conversation: {_shown(message)}")


def _shown(error: object) -> str:
    text = " ".join(str(error).split())
    if "'strftime_now' is undefined" in text:
        return (
            "the template asks for the date, which would make the data differ from day to day; give it a day, such as "
            "--chat.arguments strftime_now=2026-01-31"
        )
    name = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
    return f"{name}{text}"[:_SHOWN_CHARS]


if __name__ == "__main__":
    main()
    sys.stdout.flush()

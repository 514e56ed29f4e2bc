"""Turns the fields of a record into conversations, in the forms that published data sets have.

- messages with role and content (OpenAI): content is a text, a list of texts, or null beside tool calls; `weight` or `train` says
  whether an answer has a loss; `function_call` and `functions` of older data become tool calls and tools
- messages with from and value (ShareGPT): also the roles function_call and observation
- turns: texts of user and assistant in turn (LIMA), or objects with the text of both, such as input and output (Capybara)
- a prompt and a response, which may be texts or messages, with `input` and `history` as in Alpaca's form; beside tools a response
  may be a list of calls with name and arguments (xLAM)
- a prompt with a chosen and a rejected answer; without a prompt, both answers begin with it, as messages or as a transcript

A transcript is a text in which each turn begins with `Human:` or `Assistant:` after an empty line, as in Anthropic's data.
Beside these a record may have `system`, `tools`, `documents` and `chat_template_kwargs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.files import is_deeper
from data_pipeline.config.text import LABELS, OF_CONVERSATION, OF_PROMPT, REASONING, with_input
from data_pipeline.documents import Reason

Message = dict[str, Any]  # `role`, `content`, and the other fields of the record
ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
_OF_TURN = _OTHER_NAMES | {name: name for name in ROLES} | {"input": "user", "output": "assistant"}
_CALL = "function_call"
_CALL_ROLES = (_CALL, "tool_call")
_REFUSAL = "refusal"
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", _REFUSAL: _REFUSAL}
"""Kinds of parts of a message, and the field of each with its text."""
_WITHOUT_TEXT = ("tool_calls", *REASONING)  # an answer with one of these may have no content
_LOSS_FIELDS = ("weight", "train", "loss")
_SHOWN_CHARS = 60
_SYSTEM = ("system", "system_prompt")
_BLANK = ("null", " ")  # texts that a column of JSON has for nothing
_BAD = ("false", "0")  # labels of responses, as texts in lower case
_TURN = re.compile(r"\n\n(Human|Assistant):")
_OBJECTS, _OF_PYTHON = re.compile(r"\s*+(?:\[\s*+)?+\{"), re.compile(r"\s*+(?:\[\s*+)?+\{\s*+'(?:role|from|content)'")


class MessagesError(ValueError):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    trained: tuple[int, ...]
    """Places of the answers with a loss."""
    arguments: Mapping[str, Any]
    """What the template gets besides, such as `tools`."""

    def only_last(self) -> Conversation:
        return replace(self, trained=self.trained[-1:])


def read_chat(text: str, max_depth: int, names: Mapping[str, str] | None = None) -> list[Conversation]:
    """Return one conversation, or two for a preference pair, the better one first. `max_depth` holds in texts too.

    `names`: what errors call the fields, if the record has other names for them.
    """
    shown = {name: name for name in ("messages", "prompt", "response", "chosen", "rejected")} | dict(names or {})
    try:
        record = _flat(json.loads(text))
        beside = {name: _decoded(record.get(name), f"the field {name}") for name in OF_CONVERSATION if name not in _SYSTEM}
        beside = {name: value for name, value in beside.items() if value and value not in _BLANK}
        beside |= {name: record[name] for name in _SYSTEM if record.get(name)}
        conversations = _pair(record, shown) if "chosen" in record else [_conversation(record, shown)]
        found = [_completed(messages, weights, beside) for messages, weights in conversations]
        if not is_deeper([[one.messages, one.arguments] for one in found], max_depth):
            return found
    except RecursionError:
        pass
    raise MessagesError(Reason.TOO_DEEP, f"a message is nested deeper than limits.max_json_depth = {max_depth}")


def read_messages(value: Any) -> list[Message]:
    """Return the messages that a model is to answer. MessagesError: it is not a list of them."""
    return _messages(value, "messages")[0]


def _flat(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with the fields of its prompt in their usual places, if the prompt is an object, as in OpenAI's pairs."""
    prompt = _decoded(record.get("prompt"), "the prompt")
    if not isinstance(prompt, dict) or "messages" not in prompt:
        return record
    others = {name: value for name, value in prompt.items() if value is not None and name not in ("messages", *OF_CONVERSATION)}
    own = {name: prompt[name] for name in OF_CONVERSATION if prompt.get(name)}
    return {"chat_template_kwargs": others, **own, **record, "prompt": prompt["messages"]}


_Weighed = tuple[list[Message], list[bool]]  # messages, and for each whether it has a loss if it is an answer


def _completed(messages: list[Message], weights: Sequence[bool], beside: Mapping[str, Any]) -> Conversation:
    shift = 0
    if (system := next((beside[name] for name in _SYSTEM if name in beside), None)) is not None:
        system = _text_of(system, "the field system")
        if messages[0]["role"] in ("system", "developer"):
            if messages[0]["content"] != system:
                raise MessagesError(Reason.MESSAGES_MALFORMED, "the field system and the system message differ")
        else:
            messages, shift = [{"role": "system", "content": system}, *messages], 1
    arguments = dict(_object_of(beside, "chat_template_kwargs"))
    arguments |= {name: _list_of(beside, name) for name in ("tools", "documents") if name in beside}
    if "functions" in beside:
        arguments.setdefault("tools", [{"type": "function", "function": one} for one in _list_of(beside, "functions")])
    if reserved := sorted(arguments.keys() & {"messages", "add_generation_prompt"}):
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"chat_template_kwargs must not name {reserved[0]}")
    trained = tuple(shift + place for place, has_loss in enumerate(weights) if has_loss and _is_answer(messages[shift + place]))
    return Conversation(messages, trained, arguments)


def _conversation(record: Mapping[str, Any], shown: Mapping[str, str]) -> _Weighed:
    if bad := [name for name in LABELS if str(record.get(name)).lower() in _BAD]:
        raise MessagesError(
            Reason.NO_ANSWER,
            f"its field {bad[0]} says that the answer is a bad one; remove the record, or the field if it says something else",
        )
    if "messages" in record:
        messages, weights = _messages(_of_turns(_decoded(record["messages"], shown["messages"])), shown["messages"])
        answers = [place for place, message in enumerate(messages) if _is_answer(message)]
        if not answers:
            raise MessagesError(Reason.NO_ANSWER, "no message of the assistant has text, so there is nothing to train on")
        if not any(weights[place] for place in answers):
            raise MessagesError(Reason.NO_ANSWER, "the weights say that no message of the assistant has a loss")
        return messages, weights
    prompt, _ = _messages(_whole_prompt(record["prompt"], record), shown["prompt"], "user")
    response = _calls_of(record) or record["response"]
    answer, weights = _messages(response, shown["response"], "assistant", may_be_empty=True)
    if not _is_answer(answer[-1]):
        raise MessagesError(Reason.NO_ANSWER, f"{shown['response']} has no text, so there is nothing to train on")
    answer[-1] = {name: _text_of(record[name], f"the field {name}") for name in REASONING if record.get(name)} | answer[-1]
    before, weights_before = _history(record.get("history"))
    return [*before, *prompt, *answer], [*weights_before, *[False] * len(prompt), *weights]


def _calls_of(record: Mapping[str, Any]) -> Message | None:
    """Return the message with the calls in a response, which is a list of them if the record has tools."""
    calls = _decoded(record["response"], "the response") if record.get("tools") else None
    if not isinstance(calls, list) or not all(isinstance(one, dict) and {"name", "arguments"} <= one.keys() for one in calls):
        return None
    return {"role": "assistant", "content": "", "tool_calls": [_call(one, "the response") for one in calls]}


def _whole_prompt(prompt: Any, record: Mapping[str, Any]) -> Any:
    for name in OF_PROMPT:
        if more := record.get(name):
            if not isinstance(prompt, str) or not isinstance(more, str):
                raise MessagesError(Reason.MESSAGES_MALFORMED, f"the field {name} is {_kind(more)}, but a text is expected")
            prompt = with_input(prompt, more)
    return prompt


def _history(value: Any) -> _Weighed:
    messages: list[Message] = []
    for place, turn in enumerate(_decoded(value, "history") or []):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(one, str) for one in turn)):
            raise MessagesError(Reason.MESSAGES_MALFORMED, f"history[{place}] is not a list of a prompt and its response")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    return messages, [True] * len(messages)


def _pair(record: Mapping[str, Any], shown: Mapping[str, str]) -> list[_Weighed]:
    own = _messages(_whole_prompt(record["prompt"], record), shown["prompt"], "user")[0] if "prompt" in record else []
    prompt = [*_history(record.get("history"))[0], *own]
    answers = []
    for name in ("chosen", "rejected"):
        answer, weights = _messages(record[name], shown[name], "assistant")
        if not weights[-1]:
            raise MessagesError(
                Reason.MESSAGES_MALFORMED, f"the answer of {shown[name]} has no weight, and a pair compares both answers"
            )
        answers.append(answer)
    # Some data sets repeat the prompt in both answers, also behind a system message.
    pair = [answer if _repeats(answer, prompt) else [*prompt, *answer] for answer in answers]
    if any(prompt and len(one) > len(prompt) and one[: len(prompt)] == prompt and _has_prompt(one[len(prompt) :]) for one in pair):
        raise MessagesError(
            Reason.MESSAGES_MALFORMED, "an answer of the pair has messages of the user that are not those of the prompt"
        )
    for name, conversation in zip(("chosen", "rejected"), pair, strict=True):
        if not _is_answer(conversation[-1]):
            raise MessagesError(Reason.NO_ANSWER, f"{shown[name]} does not end with a message of the assistant that has text")
        if len(conversation) == 1:
            raise MessagesError(
                Reason.MESSAGES_MALFORMED, f"{shown[name]} has no prompt before its answer; name its field in records.prompt_field"
            )
    chosen, rejected = pair
    if chosen[:-1] != rejected[:-1]:
        raise MessagesError(Reason.MESSAGES_MALFORMED, "chosen and rejected differ before the last message; they need one prompt")
    if chosen == rejected:
        raise MessagesError(Reason.EQUAL_PAIR, "chosen and rejected are the same")
    return [(one, [*[False] * (len(one) - 1), True]) for one in pair]


def _repeats(answer: list[Message], prompt: list[Message]) -> bool:
    return answer[: len(prompt)] == prompt or answer[-1 - len(prompt) : -1] == prompt


def _has_prompt(messages: list[Message]) -> bool:
    return messages[0]["role"] in ("system", "user") and any(message["role"] == "user" for message in messages)


def _decoded(value: Any, name: str) -> Any:
    """Return a list or an object of which a table of text holds the JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    _check_surrogates(found, name)
    return found


def _check_surrogates(value: Any, name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MessagesError(Reason.LONE_SURROGATE, f"{name} contains a lone surrogate") from None


def _object_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"the field {name} is {_kind(value)}, but an object is expected")
    return {key: one for key, one in value.items() if one is not None}


def _list_of(values: Mapping[str, Any], name: str) -> list[Any]:
    value = values[name]
    if not isinstance(value, list):
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"the field {name} is {_kind(value)}, but a list is expected")
    return [_decoded(one, name) for one in value]


def _parsed(text: str) -> list[Any] | None:
    """Return the messages in a text, because tables of text can only hold them as JSON; None if the text is not such a list."""
    if (turns := _turns(text)) is not None:
        return turns
    value = _decoded(text, "a message") if _OBJECTS.match(text) else None
    value = [value] if isinstance(value, dict) and {"content", "value"} & value.keys() else value
    if value is text and _OF_PYTHON.match(text):
        raise MessagesError(Reason.MESSAGES_MALFORMED, "a list of messages is written as Python writes it; write it as JSON")
    is_list = isinstance(value, list) and all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in value)
    return value if is_list else None


def _turns(text: str) -> list[Any] | None:
    """Return the messages of a transcript, without an empty last one; None if the text is not a transcript."""
    before, *turns = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if before.strip() or turns[:1] != ["Human"] or "Assistant" not in turns[::2]:
        return None
    turns = turns if turns[-1].strip() else turns[:-2]
    return [{"from": role.lower(), "value": content.strip()} for role, content in zip(turns[::2], turns[1::2], strict=True)]


def _messages(value: Any, name: str, role: str | None = None, *, may_be_empty: bool = False) -> _Weighed:
    """Return the messages in a field. With `role`, the field may also have the text of one message."""
    if isinstance(value, str):
        found = _parsed(value)
        if found is None and role is not None:
            if not value and not may_be_empty:
                raise MessagesError(Reason.MESSAGES_MALFORMED, f"the {name} is empty")
            return [{"role": role, "content": value}], [True]
        value = value if found is None else found
    if role is not None and isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        expected = "a list of messages" if role is None else "a text or a list of messages"
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"{name} is {_kind(value)}, but {expected} is expected")
    if not value:
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"{name} is an empty list")
    found = [_message(one, f"{name}[{number}]") for number, one in enumerate(value)]
    return [message for message, _ in found], [has_loss for _, has_loss in found]


def _of_turns(value: Any) -> Any:
    """Return messages instead of texts of user and assistant in turn, or of objects whose fields are the texts of roles."""
    if not isinstance(value, list):
        return value
    decoded = [_decoded(one, "a message") for one in value]
    value = decoded if all(isinstance(one, dict) for one in decoded) else value
    if all(isinstance(one, str) for one in value):
        return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(value)]
    if not all(isinstance(one, dict) and len(one) > 1 and one.keys() <= _OF_TURN.keys() for one in value):
        return value
    return [
        {"role": role, "content": text}
        for one in value
        for role, text in sorted(((_OF_TURN[name], text) for name, text in one.items()), key=lambda turn: ROLES.index(turn[0]))
        if text or role == "assistant"
    ]


def _message(value: Any, place: str) -> tuple[Message, bool]:
    """Return a message, and whether it has a loss if it is an answer."""
    if not isinstance(value, dict):
        raise MessagesError(
            Reason.MESSAGES_MALFORMED, f"{place} is {_kind(value)}, but an object with role and content is expected"
        )
    other = "role" not in value and "from" in value
    role, content = (value.get("from"), value.get("value")) if other else (value.get("role"), value.get("content"))
    if not isinstance(role, str):
        names = ", ".join(map(repr, value))[:_SHOWN_CHARS]
        raise MessagesError(
            Reason.MESSAGES_MALFORMED,
            f"{place} has no role that is a text; its fields are {names}, but role and content are needed",
        )
    used = {"role", "content", *_LOSS_FIELDS, *(("from", "value") if other else ())}
    kept = {name: one for name, one in value.items() if one not in (None, []) and name not in used}
    if role in _CALL_ROLES:
        role, content, kept = "assistant", "", kept | {"tool_calls": _calls(content, place)}
    if _CALL in kept and "tool_calls" not in kept:
        kept["tool_calls"] = _calls(kept.pop(_CALL), place)
    elif "tool_calls" in kept:
        kept["tool_calls"] = _list_of({"tool_calls": _decoded(kept["tool_calls"], place)}, "tool_calls")
    role = role if role in ROLES else _OTHER_NAMES.get(role.lower(), role.lower())
    if role not in ROLES:
        raise MessagesError(Reason.UNKNOWN_ROLE, f"{place} has the role {role[:_SHOWN_CHARS]!r}; the roles are {', '.join(ROLES)}")
    if content is None and role == "assistant":
        content = kept.pop(_REFUSAL, "" if any(kept.get(name) for name in _WITHOUT_TEXT) else None)
    content = _text_of(content, f"the content of {place}")
    return kept | {"role": role, "content": content}, _has_loss(value, role, place)


def _text_of(value: Any, place: str) -> str:
    """Return a text, which may be cut into parts."""
    if isinstance(value, list):
        return "".join(_part(one, f"{place}, part {number}") for number, one in enumerate(value))
    if not isinstance(value, str):
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"{place} is {_kind(value)}, but a text is expected")
    return value


def _part(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    kind = str(value.get("type")) if isinstance(value, dict) else ""
    if kind in _TEXT_PARTS and isinstance(text := value.get(_TEXT_PARTS[kind]), str):
        return text
    raise MessagesError(Reason.MESSAGES_MALFORMED, f"{place} is of type {kind[:_SHOWN_CHARS]!r}, and only text can be trained on")


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Return the calls in a field of one call, or of several in a list."""
    found = _decoded(value, place)
    return [_call(one, place) for one in (found if isinstance(found, list) and found else [found])]


def _call(function: Any, place: str) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessagesError(
            Reason.MESSAGES_MALFORMED, f"{place} is a function call without a name; JSON with name and arguments is needed"
        )
    return {"type": "function", "function": function}


def _has_loss(value: Mapping[str, Any], role: str, place: str) -> bool:
    said = {name: value[name] for name in _LOSS_FIELDS if value.get(name) is not None}
    if wrong := [name for name, one in said.items() if not isinstance(one, bool | int | float) or one not in (0, 1)]:
        raise MessagesError(
            Reason.MESSAGES_MALFORMED, f"{wrong[0]} of {place} is {str(said[wrong[0]])[:_SHOWN_CHARS]}; it must be 0 or 1"
        )
    if len({bool(one) for one in said.values()}) > 1:
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"weight and train of {place} contradict each other")
    if role != "assistant" and any(said.values()):
        raise MessagesError(
            Reason.MESSAGES_MALFORMED,
            f"{next(iter(said))} of {place} asks for a loss on a message of {role}; only answers have one",
        )
    return all(said.values())


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or any(message.get(name) for name in _WITHOUT_TEXT))


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing"}.get(
        type(value), "a number"
    )

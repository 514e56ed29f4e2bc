from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.files import is_deeper
from data_pipeline.documents import Reason

Message = dict[str, Any]  # `role`, `content`, and the other fields of the record
ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {"human": "user", "gpt": "assistant"}  # names of roles in records with `from` and `value`
_ONE_TURN = {"prompt": "user", "response": "assistant"}
_SHOWN_CHARS = 60


class MessagesError(ValueError):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_chat(text: str, max_depth: int) -> list[list[Message]]:
    """Return one conversation, or two for a preference pair, the better one first. `max_depth` holds in texts too."""
    try:
        record = json.loads(text)
        conversations = _pair(record) if "chosen" in record else [_conversation(record)]
        if not is_deeper(conversations, max_depth):
            return conversations
    except RecursionError:
        pass
    raise MessagesError(Reason.TOO_DEEP, f"a message is nested deeper than limits.max_json_depth = {max_depth}")


def _conversation(record: Mapping[str, Any]) -> list[Message]:
    if "messages" in record:
        conversation = _messages(record["messages"], "messages")
    else:
        conversation = [_message({"role": role, "content": record[name]}, name) for name, role in _ONE_TURN.items()]
        if not conversation[0]["content"]:
            raise MessagesError(Reason.MESSAGES_MALFORMED, "the prompt is empty")
    if not any(_is_answer(message) for message in conversation):
        raise MessagesError(Reason.NO_ANSWER, "no message of the assistant has text, so there is nothing to train on")
    return conversation


def _pair(record: Mapping[str, Any]) -> list[list[Message]]:
    prompt = _messages(record["prompt"], "prompt", "user")
    answers = [_messages(record[name], name, "assistant") for name in ("chosen", "rejected")]
    # Some data sets repeat the prompt at the beginning of both answers.
    pair = [answer if answer[: len(prompt)] == prompt else [*prompt, *answer] for answer in answers]
    for name, conversation in zip(("chosen", "rejected"), pair, strict=True):
        if not _is_answer(conversation[-1]):
            raise MessagesError(Reason.NO_ANSWER, f"{name} does not end with a message of the assistant that has text")
    chosen, rejected = pair
    if chosen[:-1] != rejected[:-1]:
        raise MessagesError(Reason.MESSAGES_MALFORMED, "chosen and rejected differ before the last message; they need one prompt")
    if chosen == rejected:
        raise MessagesError(Reason.EQUAL_PAIR, "chosen and rejected are the same")
    return pair


def _parsed(text: str) -> list[Any] | None:
    """Return the messages in a text, because tables of text can only hold them as JSON; None if the text is not such a list."""
    if not text.lstrip().startswith("[{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MessagesError(Reason.LONE_SURROGATE, "a message contains a lone surrogate") from None
    return (
        value if isinstance(value, list) and all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in value) else None
    )


def _messages(value: Any, name: str, role: str | None = None) -> list[Message]:
    """Return the messages in a field. With `role`, the field may also have the text of one message."""
    if isinstance(value, str):
        found = _parsed(value)
        if found is None and role is not None:
            if not value:
                raise MessagesError(Reason.MESSAGES_MALFORMED, f"{name} is empty")
            return [{"role": role, "content": value}]
        value = value if found is None else found
    if not isinstance(value, list):
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"{name} is {_kind(value)}, but a list of messages is expected")
    if not value:
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"{name} is an empty list")
    return [_message(one, f"{name}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise MessagesError(
            Reason.MESSAGES_MALFORMED, f"{place} is {_kind(value)}, but an object with role and content is expected"
        )
    other = "role" not in value and "from" in value
    role, content = (value.get("from"), value.get("value")) if other else (value.get("role"), value.get("content"))
    if not isinstance(role, str):
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"{place} has no role that is a text")
    role = _OTHER_NAMES.get(role, role) if other else role
    if role not in ROLES:
        raise MessagesError(Reason.UNKNOWN_ROLE, f"{place} has the role {role[:_SHOWN_CHARS]!r}; the roles are {', '.join(ROLES)}")
    if content is None and role == "assistant" and value.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise MessagesError(Reason.MESSAGES_MALFORMED, f"the content of {place} is {_kind(content)}, but a text is expected")
    kept = {} if other else {name: one for name, one in value.items() if one is not None}
    return kept | {"role": role, "content": content}


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing"}.get(
        type(value), "a number"
    )

"""What becomes of each field of a conversation, by the form of its record: the table of docs/data.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from data_pipeline.config import ChatConfig, RecordConfig, TokenizerConfig
from data_pipeline.conversations.chat_template import chosen_template
from data_pipeline.conversations.rendering import ChatRenderer
from data_pipeline.documents import Document, Rejection
from data_pipeline.sources.parsers.fields import form_of
from data_pipeline.sources.parsers.source_format import Origin

_ASK, _SAY = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Say"}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
_SHARE = [{"from": "human", "value": "Ask"}, {"from": "gpt", "value": "Say"}]
FORMS: Mapping[str, dict[str, Any]] = {
    "OpenAI": {"messages": [_ASK, _SAY, _ASK, _SAY]},
    "ShareGPT": {"conversations": [*_SHARE, *_SHARE]},
    "prompt and response, Alpaca": {"instruction": "Ask", "output": "Say"},
    "preference pairs": {"prompt": [_ASK], "chosen": [_SAY], "rejected": [{"role": "assistant", "content": "No"}]},
}
_LISTS = ("messages", "conversations", "chosen")
FIELDS: Mapping[str, Any] = {
    "system": "Be kind",
    "tools": [{"type": "function", "function": {"name": "weather"}}],
    "documents": [{"title": "A page"}],
    "input": "More",
    "history": [["One", "Two"]],
    "tool_calls": [_CALL],
    "reasoning_content": "Why",
    "weight": 0,
    "train": False,
    "loss": False,
    "name": "Ann",
    "id": "x1",
}
"""An example of each. Those from `tool_calls` on are fields of a message; the others are fields of the record."""
_OF_MESSAGES = ("tool_calls", "reasoning_content", "weight", "train", "loss", "name", "id")


def outcomes(template: str = "chatml", **settings: Any) -> dict[str, dict[str, str]]:
    """Return what becomes of each field in each form: kept, counted, refused, or nothing where the form has no such field."""
    chat = ChatConfig.model_validate({"template": template} | settings)
    found = chosen_template(chat, TokenizerConfig(kind="byte"), chat.special_tokens)
    assert found is not None
    with ChatRenderer(found, chat) as renderer:
        return {name: {field: _outcome(renderer, record, field) for field in FIELDS} for name, record in FORMS.items()}


def _outcome(renderer: ChatRenderer, record: Mapping[str, Any], field: str) -> str:
    changed = {**record, field: FIELDS[field]}
    if field in _OF_MESSAGES and (name := next((name for name in _LISTS if name in record), None)) is not None:
        messages = list(record[name])
        messages[len(messages) // 4] = messages[len(messages) // 4] | {field: FIELDS[field]}  # an answer
        changed = {**record, name: messages}
    num_before = renderer.unused.total()
    form = form_of(record)
    assert form is not None
    records, origin = RecordConfig.model_validate(form.settings), Origin("", markup="chat")
    usual, read = (origin.record(one, 1, 0, records) for one in (record, changed))
    before, found = (renderer.documents(one, 100) for one in (usual, read))
    if isinstance(found[0], Rejection):
        return "refused"
    if [replace(one, unread=()) for one in found if isinstance(one, Document)] != before:
        return "kept"
    return "counted" if read.unread or renderer.unused.total() > num_before else ""

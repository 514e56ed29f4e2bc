"""The forms of records that published data sets have, by the names of their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from data_pipeline.documents import Reason
from data_pipeline.sources.parsers.source_format import MalformedError

_SHOWN = 8


class Form(NamedTuple):
    name: str
    settings: Mapping[str, str]
    """Settings of `records` and the names of the fields."""

    @property
    def words(self) -> str:
        return " ".join(f"--records.{name} {field}" for name, field in self.settings.items())


_PROMPTS = ("instruction", "prompt", "question", "query", "problem", "inputs", "input")
_ANSWERS = (
    "output",
    "response",
    "completion",
    "solution",
    "generated_solution",
    "answer",
    "targets",
    "target",
    "answers",
    "content",
)
_PAIRS = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
    ("response_j", "response_k"),
)
_FORMS = (
    *(
        Form("preference pairs", {**prompt, "chosen_field": chosen, "rejected_field": rejected})
        for chosen, rejected in _PAIRS
        for prompt in (*({"prompt_field": name} for name in (*_PROMPTS, "conversations")), {})
    ),
    Form("conversations with role and content (OpenAI)", {"messages_field": "messages"}),
    Form("conversations with from and value (ShareGPT)", {"messages_field": "conversations"}),
    Form("conversations", {"messages_field": "conversation"}),
    Form("instructions (Alpaca)", {"prompt_field": "instruction", "text_field": "output"}),
    *(
        Form("prompts with answers", {"prompt_field": prompt, "text_field": answer})
        for prompt in _PROMPTS
        for answer in _ANSWERS
        if prompt != answer
    ),
)
"""The first one whose fields a record has is its form."""


def form_of(fields: Collection[str]) -> Form | None:
    return next((form for form in _FORMS if all(field in fields for field in form.settings.values())), None)


def missing_field(kind: str, name: str, fields: Collection[str], setting: str) -> MalformedError:
    """Return the error of a record without a field that it must have. `kind` is `field` or `column`."""
    shown = ", ".join(map(repr, [*fields][:_SHOWN])) or "none"
    form = form_of(fields)
    advice = (
        f"see records.{setting}; conversations need chat.template and records.messages_field, or prompt_field and text_field; "
        "pairs need chosen_field and rejected_field"
    )
    if form is not None and setting == "messages_field":
        advice = f"these are {form.name}, and a source has records of one form; make a source of the files of each form"
    elif form is not None:
        template = "" if "text_field" in form.settings else " --chat.template chatml"
        advice = f"these are {form.name}: {form.words}{template}"
    return MalformedError(Reason.NO_TEXT_FIELD, f"no {kind} {name!r}; the {kind}s are {shown}; {advice}", tuple(fields))

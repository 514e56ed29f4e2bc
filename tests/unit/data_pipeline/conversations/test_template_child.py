"""Long conversations: their answers are found without rendering all messages before each of them, at the same places."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from data_pipeline.conversations import template_child
from tests.support.chats import TEMPLATES

SOURCES = TEMPLATES | {path.stem: path.read_text() for path in Path(template_child.__file__).parent.glob("*.jinja")}
LINEAR = {
    "chatml",
    "llama3",
    "plain",
    "system in the first prompt",
    "roles alternate",
    "tools",
}
SOURCES |= {
    "system in the first prompt": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if m.role == 'user' %}<s>[INST] {{ (system if loop.first else '') + m.content }} [/INST]"
        "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    ),
    "roles alternate": (
        "<bos>{% set shift = 1 if messages[0].role == 'system' else 0 %}{% for m in messages %}"
        "{% if loop.index0 >= shift and m.role != 'tool' and (m.role == 'user') != ((loop.index0 - shift) % 2 == 0) %}"
        "{{ raise_exception('the roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}</turn>\n{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    ),
    "tools": "{{ tools | tojson }}" + SOURCES["chatml"],
    "the last reasoning": (
        "{% for m in messages %}<{{ m.role }}>{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content }}"
        "<end>\n{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    ),
    "the number of messages": (
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    ),
    "only long ones": (
        "{% for m in messages %}<{{ m.role }}>{{ 'still ' if messages | length > 30 and loop.first }}{{ m.content }}<end>"
        "{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    ),
}


def conversation(numbers: random.Random, kind: str, turns: int) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "Be kind"}] if numbers.random() < 0.5 else []
    for turn in range(turns):
        words = " ".join(numbers.choices(["sea", " sun ", "wind", "\n"], k=5))
        messages.append({"role": "user", "content": f"Ask {turn} {words}"})
        for _ in range(numbers.choice([0, 0, 1, 9]) if kind == "agent" else 0):
            call = {"function": {"name": "look", "arguments": {"at": words}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": words})
        messages.append({"role": "assistant", "content": f"Say {words}"})
    return messages


def answer(source: str, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Return the answer of the child, and how many messages it has rendered."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[template_child._Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = template_child._to_json
    environment.globals |= {"raise_exception": template_child._raise}
    template, num_rendered = environment.from_string(source), 0

    class Counting:
        def render(self, values: dict[str, Any]) -> str:
            nonlocal num_rendered
            num_rendered += len(values["messages"])
            return template.render(values)

    numbers = random.Random(len(messages))
    trained = [place for place, one in enumerate(messages) if one["role"] == "assistant" and numbers.random() < 0.9]
    request = {
        "messages": messages,
        "arguments": {"tools": [{"name": "look"}]},
        "marks": "\ue000\ue001",
        "trained": trained,
        "probes": [],
    }
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        found = template_child._answer(Counting(), variables, request)  # type: ignore[arg-type]
    except template_child._Refused as error:
        found = {"refused": str(error)}
    return found, num_rendered


@pytest.mark.parametrize("kind", ["chat", "agent"])
@pytest.mark.parametrize("name", SOURCES)
def test_the_answers_of_a_long_conversation_are_at_the_same_places(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(name)
    for turns in (15, 25):
        messages = conversation(numbers, kind, turns)
        found, _ = answer(SOURCES[name], messages)
        with monkeypatch.context() as patched:
            patched.setattr(template_child, "_SHORT", 10_000)
            expected, _ = answer(SOURCES[name], messages)
        assert found == expected
        assert name not in LINEAR or "examples" in found or kind == "agent"


def steps_of_an_agent(count: int) -> list[dict[str, Any]]:
    step = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}, {"role": "tool", "content": "4"}]
    return [{"role": "user", "content": "Ask"}, *step * count, {"role": "assistant", "content": "Say"}]


@pytest.mark.parametrize("name", sorted(LINEAR))
def test_twice_as_many_messages_are_rendered_twice_as_often(name: str) -> None:
    short, long = (answer(SOURCES[name], conversation(random.Random(1), "chat", turns))[1] for turns in (100, 200))
    assert long < 2.2 * short
    if name in ("chatml", "llama3", "plain", "tools"):
        short, long = (answer(SOURCES[name], steps_of_an_agent(count))[1] for count in (100, 200))
        assert long < 2.2 * short

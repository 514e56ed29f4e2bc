"""What becomes of each field of a record, in the forms that published data sets have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

import pytest

from data_pipeline.config import ChatConfig, TokenizerConfig
from data_pipeline.conversations.chat_template import ChatTemplate, chosen_template
from data_pipeline.conversations.messages import Conversation, MessagesError, read_chat
from data_pipeline.conversations.rendering import ChatRenderer
from data_pipeline.documents import Document, Reason, Rejection, cut_text
from data_pipeline.tokenizer import ByteTokenizer

NAMED = ("chatml", "llama3", "plain")
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city"}}
ASK, SAY = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Say"}


def read(record: Mapping[str, Any]) -> Conversation:
    [found] = read_chat(json.dumps(record), 100)
    return found


def refusal(record: Mapping[str, Any]) -> tuple[Reason, str]:
    with pytest.raises(MessagesError) as error:
        read_chat(json.dumps(record), 100)
    return error.value.reason, str(error.value)


def texts(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "OpenAI": ({"messages": [ASK, SAY]}, [("user", "Ask"), ("assistant", "Say")]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "sk"}]}, SAY]},
        [("user", "Ask"), ("assistant", "Say")],
    ),
    "ShareGPT": (
        {"messages": [{"from": "human", "value": "Ask"}, {"from": "gpt", "value": "Say"}]},
        [("user", "Ask"), ("assistant", "Say")],
    ),
    "ShareGPT with tools": (
        {
            "system": "Be kind",
            "messages": [
                {"from": "human", "value": "Ask"},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "4 degrees"},
                {"from": "gpt", "value": "Say"},
            ],
        },
        [("system", "Be kind"), ("user", "Ask"), ("assistant", ""), ("tool", "4 degrees"), ("assistant", "Say")],
    ),
    "Alpaca": (
        {"prompt": "Ask", "input": "More", "history": [["One", "Two"]], "response": "Say"},
        [("user", "One"), ("assistant", "Two"), ("user", "Ask\n\nMore"), ("assistant", "Say")],
    ),
    "Dolly": (
        {"prompt": "Ask", "context": "About the sea", "response": "Say"},
        [("user", "Ask\n\nAbout the sea"), ("assistant", "Say")],
    ),
    "OpenOrca": (
        {"system_prompt": "Be kind", "prompt": "Ask", "response": "Say"},
        [("system", "Be kind"), ("user", "Ask"), ("assistant", "Say")],
    ),
    "prompt and completion of messages": (
        {"prompt": [SAY, ASK], "response": [SAY]},
        [("assistant", "Say"), ("user", "Ask"), ("assistant", "Say")],
    ),
    "messages as text": ({"messages": json.dumps([ASK, SAY])}, [("user", "Ask"), ("assistant", "Say")]),
    "a list of calls in one text": (
        {
            "messages": [
                {"from": "user", "value": "Ask"},
                {"role": "tool_call", "content": json.dumps([CALL["function"], CALL["function"]])},
                {"role": "tool_response", "content": "4"},
                {"from": "bing", "value": "Say"},
            ]
        },
        [("user", "Ask"), ("assistant", ""), ("tool", "4"), ("assistant", "Say")],
    ),
    "names of roles": (
        {"messages": [{"role": "Human", "content": "Ask"}, {"role": "model", "content": "Say"}]},
        [("user", "Ask"), ("assistant", "Say")],
    ),
    "refusal": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "refusal": "No"},
                ASK,
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never"}]},
            ]
        },
        [("user", "Ask"), ("assistant", "No"), ("user", "Ask"), ("assistant", "Never")],
    ),
    "system in parts": (
        {"system": [{"type": "text", "text": "Be kind"}], "messages": [ASK, SAY]},
        [("system", "Be kind"), ("user", "Ask"), ("assistant", "Say")],
    ),
    "transcript": (
        {"messages": "\n\nHuman: Ask\n\nAssistant: Say\n\nmore"},
        [("user", "Ask"), ("assistant", "Say\n\nmore")],
    ),
    "old function call": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "name": "weather", "content": "4"},
            ]
        },
        [("user", "Ask"), ("assistant", ""), ("tool", "4")],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_gives_the_messages(name: str) -> None:
    record, expected = FORMS[name]
    assert texts(read(record)) == expected


def test_calls_of_tools_are_kept_in_every_form() -> None:
    for name in ("ShareGPT with tools", "old function call"):
        [calls] = [message["tool_calls"] for message in read(FORMS[name][0]).messages if "tool_calls" in message]
        assert calls == [{"type": "function", "function": CALL["function"]}]


def test_calls_in_a_text_are_calls() -> None:
    two = read(FORMS["a list of calls in one text"][0]).messages[1]
    assert [call["function"] for call in two["tool_calls"]] == [CALL["function"]] * 2
    assert read({"messages": [ASK, SAY | {"tool_calls": json.dumps([CALL])}]}).messages[1]["tool_calls"] == [CALL]


def test_reasoning_beside_a_response_is_that_of_the_answer() -> None:
    assert read({"prompt": "Ask", "reasoning": "Why", "response": "Say"}).messages[1] == SAY | {"reasoning": "Why"}


PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Ask", "chosen": "Say", "rejected": "No"},
    "one message": {"prompt": "Ask", "chosen": SAY, "rejected": {"from": "gpt", "value": "No"}},
    "messages": {"prompt": "Ask", "chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "No"}]},
    "messages without a prompt": {"chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "No"}]},
    "transcripts": {"chosen": "\n\nHuman: Ask\n\nAssistant: Say", "rejected": "\n\nHuman: Ask\n\nAssistant: No"},
    "a transcript and answers": {"prompt": "Human: Ask\n\nAssistant:", "chosen": "Say", "rejected": "No"},
    "JSON of a message": {"prompt": "Ask", "chosen": json.dumps(SAY), "rejected": json.dumps({"from": "gpt", "value": "No"})},
    "JSON of OpenAI": {"prompt": json.dumps({"messages": [ASK]}), "chosen": json.dumps([SAY]), "rejected": "No"},
    "OpenAI": {"prompt": {"messages": [ASK], "tools": []}, "chosen": [SAY], "rejected": [SAY | {"content": "No"}]},
}


@pytest.mark.parametrize("name", PAIRS)
def test_each_form_of_a_pair_gives_two_conversations(name: str) -> None:
    found = read_chat(json.dumps(PAIRS[name]), 100)
    assert [texts(one) for one in found] == [[("user", "Ask"), ("assistant", "Say")], [("user", "Ask"), ("assistant", "No")]]


TURNS: dict[str, list[Any]] = {
    "texts": ["Ask", "Say", "Ask again", "Say again"],
    "input and output": [{"input": "Ask", "output": "Say"}, {"input": "Ask again", "output": "Say again"}],
    "an answer before its question": [{"assistant": "Say", "human": "Ask"}, {"output": "Say again", "user": "Ask again"}],
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_of_two_speakers_become_messages(name: str) -> None:
    found = read({"messages": TURNS[name]})
    assert texts(found) == [("user", "Ask"), ("assistant", "Say"), ("user", "Ask again"), ("assistant", "Say again")]
    assert found.trained == (1, 3)
    assert read({"messages": json.dumps(TURNS[name])}) == found


def test_messages_that_are_json_are_no_turns() -> None:
    assert texts(read({"messages": [json.dumps(ASK), json.dumps(SAY)]})) == [("user", "Ask"), ("assistant", "Say")]
    assert texts(read({"messages": ["Ask", '{"a": 1}']})) == [("user", "Ask"), ("assistant", '{"a": 1}')]


def test_the_system_text_of_a_turn_comes_first_and_an_empty_one_is_left_out() -> None:
    turns = [{"input": "Ask", "output": "Say", "system": "Be kind"}, {"system": "", "input": "Ask", "output": ""}]
    found = read({"messages": turns})
    assert texts(found)[:2] == [("system", "Be kind"), ("user", "Ask")]
    assert texts(found)[3:] == [("user", "Ask"), ("assistant", "")]
    assert found.trained == (2,)


def test_a_list_of_calls_beside_tools_is_an_answer_that_calls_them() -> None:
    calls = [CALL["function"], {"name": "time", "arguments": {}}]
    for response in (calls, json.dumps(calls)):
        record = {"prompt": "Ask", "response": response}
        answer = read(record | {"tools": [TOOL]}).messages[-1]
        assert [call["function"] for call in answer["tool_calls"]] == calls
        assert answer["content"] == ""
    assert texts(read({"prompt": "Ask", "response": json.dumps(calls)}))[-1] == ("assistant", json.dumps(calls))


@pytest.mark.parametrize("response", ['{"city": "Oslo"}', '{"role": "admin"}', "{not JSON}", "[1, 2]", "{'a': 1}"])
def test_an_answer_that_is_json_and_no_message_stays_text(response: str) -> None:
    assert texts(read({"prompt": "{}", "response": response})) == [("user", "{}"), ("assistant", response)]


def test_an_error_names_the_field_as_the_record_does() -> None:
    with pytest.raises(MessagesError, match=r"solution is a number, but a text"):
        read_chat(json.dumps({"prompt": "Ask", "response": 4}), 100, {"prompt": "problem", "response": "solution"})


def test_the_object_that_holds_a_prompt_loses_no_field() -> None:
    prompt = {"messages": [ASK], "tools": [TOOL], "parallel_tool_calls": True}
    found = read_chat(json.dumps(PAIRS["OpenAI"] | {"prompt": prompt}), 100)
    assert found[0].arguments == {"tools": [TOOL], "parallel_tool_calls": True}


def test_what_stands_beside_the_messages_goes_to_the_template() -> None:
    beside = {"tools": [TOOL], "documents": [{"title": "T"}], "chat_template_kwargs": {"enable_thinking": False}}
    assert read({"messages": [ASK, SAY]} | beside).arguments == {
        "tools": [TOOL],
        "documents": [{"title": "T"}],
        "enable_thinking": False,
    }
    as_text = {"messages": [ASK, SAY], "tools": json.dumps([TOOL])}
    assert read(as_text).arguments == {"tools": [TOOL]}
    assert read({"messages": [ASK, SAY], "functions": [TOOL["function"]]}).arguments == {"tools": [TOOL]}


@pytest.mark.parametrize("nothing", ["[]", "{}", "null", "", None, []])
def test_a_column_that_says_that_there_is_nothing_is_absent(nothing: Any) -> None:
    names = ("tools", "functions", "documents", "chat_template_kwargs")
    assert read({"messages": [ASK, SAY]} | dict.fromkeys(names, nothing)).arguments == {}


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({}, (1, 3)),
        ({"weight": 0}, (3,)),
        ({"weight": 0.0}, (3,)),
        ({"train": False}, (3,)),
        ({"loss": False}, (3,)),
        ({"weight": 1, "train": True}, (1, 3)),
        ({"weight": None}, (1, 3)),
    ],
)
def test_a_weight_decides_whether_an_answer_has_a_loss(fields: dict[str, Any], trained: tuple[int, ...]) -> None:
    conversation = read({"messages": [ASK, SAY | fields, ASK, SAY]})
    assert conversation.trained == trained
    assert not {"weight", "train"} & conversation.messages[1].keys()


def test_the_answers_in_a_prompt_have_no_loss() -> None:
    assert read({"prompt": [ASK, SAY, ASK], "response": "Say"}).trained == (3,)
    assert read({"system": "S", "prompt": "Ask", "response": "Say"}).trained == (2,)


@pytest.mark.parametrize(
    ("record", "reason", "words"),
    [
        ({"messages": [ASK, SAY | {"weight": 0.5}]}, Reason.MESSAGES_MALFORMED, "must be 0 or 1"),
        ({"messages": [ASK, SAY | {"weight": 1, "train": False}]}, Reason.MESSAGES_MALFORMED, "contradict"),
        ({"messages": [ASK | {"train": True}, SAY]}, Reason.MESSAGES_MALFORMED, "only answers have one"),
        ({"messages": [ASK, SAY | {"weight": 0}]}, Reason.NO_ANSWER, "weights"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAY]}, Reason.MESSAGES_MALFORMED, "image_url"),
        ({"messages": [{"role": "user", "content": None}, SAY]}, Reason.MESSAGES_MALFORMED, "missing"),
        ({"messages": [{"from": "function_call", "value": "no JSON"}]}, Reason.MESSAGES_MALFORMED, "function call"),
        ({"messages": [ASK, SAY], "tools": "weather"}, Reason.MESSAGES_MALFORMED, "tools is a text"),
        ({"messages": [{"role": "system", "content": "A"}, ASK, SAY], "system": "B"}, Reason.MESSAGES_MALFORMED, "differ"),
        *(({"prompt": "A", "response": "B", "label": bad}, Reason.NO_ANSWER, "a bad one") for bad in (False, 0, "False")),
        ({"messages": [ASK, SAY], "kto_tag": False}, Reason.NO_ANSWER, "its field kto_tag"),
        ({"prompt": "A", "response": 5}, Reason.MESSAGES_MALFORMED, "response is a number, but a text or a list of messages"),
        ({"prompt": "A", "response": "[{'role': 'assistant', 'content': 'B'}]"}, Reason.MESSAGES_MALFORMED, "as Python writes it"),
        (
            {"prompt": "A", "chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "No"}]},
            Reason.MESSAGES_MALFORMED,
            "of the prompt",
        ),
        ({"prompt": "A", "chosen": [SAY | {"weight": 0}], "rejected": "C"}, Reason.MESSAGES_MALFORMED, "compares both"),
        ({"chosen": "B", "rejected": "C"}, Reason.MESSAGES_MALFORMED, "records.prompt_field"),
        ({"messages": [{"speaker": "A", "text": "B"}]}, Reason.MESSAGES_MALFORMED, "'speaker', 'text', but role and content"),
        ({"prompt": "A", "response": "[]", "tools": [TOOL]}, Reason.NO_ANSWER, "no text"),
        ({"prompt": "A", "response": [{"name": "f"}], "tools": [TOOL]}, Reason.MESSAGES_MALFORMED, "no role"),
        ({"messages": [ASK, SAY | {"tool_calls": "weather"}]}, Reason.MESSAGES_MALFORMED, "tool_calls is a text"),
        ({"messages": [ASK, SAY], "chat_template_kwargs": {"messages": []}}, Reason.MESSAGES_MALFORMED, "must not name"),
    ],
)
def test_a_field_that_cannot_be_used_is_a_reason(record: dict[str, Any], reason: Reason, words: str) -> None:
    found, text = refusal(record)
    assert found is reason
    assert words in text


@pytest.fixture(scope="module", params=NAMED)
def named(request: pytest.FixtureRequest) -> Iterator[ChatRenderer]:
    settings = ChatConfig.model_validate({"template": request.param})
    template = chosen_template(settings, TokenizerConfig(kind="byte"), settings.special_tokens)
    assert template is not None
    with ChatRenderer(template, settings) as renderer:
        yield renderer


def documents(renderer: ChatRenderer, record: Mapping[str, Any]) -> list[Document | Rejection]:
    return renderer.documents(Document(json.dumps(record), "a.jsonl", 1, 0, markup="chat"), 100)


def text_and_answers(renderer: ChatRenderer, record: Mapping[str, Any]) -> tuple[str, list[str]]:
    [found] = documents(renderer, record)
    assert isinstance(found, Document), found
    return found.text, cut_text(found.text, found.parts)[1::2]


def test_named_templates_write_calls_results_reasoning_tools_and_documents(named: ChatRenderer) -> None:
    thought = {"role": "assistant", "content": None, "reasoning_content": "I need it", "tool_calls": [CALL]}
    record = {
        "messages": [{"role": "system", "content": "Be kind"}, ASK, thought, {"role": "tool", "content": "4 degrees"}, SAY],
        "tools": [TOOL],
        "documents": [{"title": "A page"}],
    }
    text, answers = text_and_answers(named, record)
    for words in ("Be kind", "Weather of a city", "A page", "4 degrees", "Ask"):
        assert words in text
        assert not any(words in answer for answer in answers)
    assert len(answers) == 2
    for words in ("I need it", "weather", '{"city": "Oslo"}'):
        assert words in answers[0]
    assert "Say" in answers[1]
    assert not named.unused.keys() - {"tool_calls"}


def test_arguments_that_are_a_text_are_written_once(named: ChatRenderer) -> None:
    call = CALL | {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    _, [answer] = text_and_answers(named, {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert answer.count('{"city": "Oslo"}') == 1


def test_an_answer_without_weight_has_no_loss(named: ChatRenderer) -> None:
    text, answers = text_and_answers(named, {"messages": [ASK, SAY | {"content": "Wrong", "weight": 0}, ASK, SAY]})
    assert "Wrong" in text
    assert len(answers) == 1
    assert "Wrong" not in answers[0]


SIMPLE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant:' if add_generation_prompt }}"
)
BYTES = ByteTokenizer(("<|im_start|>", "<|im_end|>"))


def renderer(source: str, **settings: Any) -> ChatRenderer:
    return ChatRenderer(ChatTemplate.of(source, BYTES), ChatConfig.model_validate({"template": "chatml"} | settings))


@pytest.mark.parametrize(
    ("record", "lost"),
    [
        ({"messages": [ASK, SAY | {"tool_calls": [CALL]}]}, "assistant.tool_calls"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "reasoning_content": "Why"}]}, "assistant.reasoning_content"),
        ({"messages": [ASK, SAY], "tools": [TOOL]}, "tools"),
        ({"messages": [ASK, SAY], "documents": [{"a": "b"}]}, "documents"),
    ],
)
def test_a_template_that_leaves_something_out_refuses_or_counts_the_record(record: dict[str, Any], lost: str) -> None:
    with renderer(SIMPLE) as strict, renderer(SIMPLE, unused_fields="keep") as lenient:
        for _ in range(2):
            [found] = documents(strict, record)
            assert isinstance(found, Rejection)
            assert found.reason is Reason.UNUSED_FIELD
            assert lost in found.detail
            [kept] = documents(lenient, record)
            assert isinstance(kept, Document)
        assert lenient.unused
        assert all(name.startswith(lost) and count == 2 for name, count in lenient.unused.items())


def test_other_fields_are_counted() -> None:
    with renderer(SIMPLE) as renderer_:
        answer = SAY | {"reasoning_content": "Why"}
        assert text_and_answers(renderer_, {"messages": [ASK | {"id": "x", "name": "Ann"}, answer]})[1] == ["Say<|im_end|>"]
        assert renderer_.unused == {"user.id": 1, "user.name": 1, "assistant.reasoning_content": 1}


def test_the_text_of_a_role_that_the_template_skips_is_not_lost() -> None:
    source = SIMPLE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    with renderer(source) as renderer_:
        [found] = documents(renderer_, {"system": "Be kind", "messages": [ASK, SAY]})
        assert isinstance(found, Rejection)
        assert "system.content" in found.detail


def test_settings_and_records_give_the_template_values() -> None:
    source = "{{ style }}" + SIMPLE
    with renderer(source, arguments=("style=short",)) as renderer_:
        assert text_and_answers(renderer_, {"messages": [ASK, SAY]})[0].startswith("short<")
        own = {"messages": [ASK, SAY], "chat_template_kwargs": {"style": "long"}}
        assert text_and_answers(renderer_, own)[0].startswith("long<")


def test_the_date_of_a_template_is_the_day_that_is_given() -> None:
    source = "{{ strftime_now('%d %b %Y') }}" + SIMPLE
    with renderer(source, arguments=("strftime_now=2026-01-31",)) as dated, renderer(source) as undated:
        assert text_and_answers(dated, {"messages": [ASK, SAY]})[0].startswith("31 Jan 2026<")
        own = {"messages": [ASK, SAY], "chat_template_kwargs": {"strftime_now": "2025-12-01"}}
        assert text_and_answers(dated, own)[0].startswith("01 Dec 2025<")
        [found] = documents(undated, {"messages": [ASK, SAY]})
        assert isinstance(found, Rejection)
        assert "give it a day, such as --chat.arguments strftime_now=2026-01-31" in found.detail
        [found] = documents(undated, own | {"chat_template_kwargs": {"strftime_now": "today"}})
        assert isinstance(found, Rejection)
        assert "'today'" in found.detail


def test_only_a_template_that_cannot_do_without_the_date_gets_that_of_today() -> None:
    with ChatRenderer(ChatTemplate.of("{{ strftime_now('%Y-%m-%d') }}" + SIMPLE, BYTES)) as renderer_:
        assert date.fromisoformat(renderer_.conversation([ASK, SAY]).text[:10]) <= date.today()
    source = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}" + SIMPLE
    with ChatRenderer(ChatTemplate.of(source, BYTES)) as renderer_:
        assert renderer_.conversation([ASK, SAY]).text.startswith("2024<")


def test_text_beside_a_call_that_a_template_leaves_out_is_noticed() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{{ '<|im_start|>assistant:' if add_generation_prompt }}"
    )
    with renderer(source) as renderer_:
        assert isinstance(documents(renderer_, {"messages": [ASK, SAY]})[0], Document)
        [found] = documents(renderer_, {"messages": [ASK, SAY | {"tool_calls": [CALL]}]})
        assert isinstance(found, Rejection)
        assert "assistant.content" in found.detail


def test_a_template_that_writes_only_the_names_of_tools_is_noticed() -> None:
    source = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + SIMPLE
    with renderer(source) as renderer_:
        [found] = documents(renderer_, {"messages": [ASK, SAY], "tools": [TOOL]})
        assert isinstance(found, Rejection)
        assert "tools.description" in found.detail


def test_a_field_that_both_answers_of_a_pair_have_counts_once() -> None:
    with renderer(SIMPLE) as renderer_:
        record = {"prompt": [ASK | {"mood": "calm"}], "chosen": "Say", "rejected": "No"}
        assert isinstance(documents(renderer_, record)[0], Document)
        assert renderer_.unused == {"user.mood": 1}


def test_only_the_last_answer_can_have_a_loss() -> None:
    with renderer(SIMPLE, answers="last") as renderer_:
        _, answers = text_and_answers(renderer_, {"messages": [ASK, SAY, ASK, SAY | {"content": "Last"}]})
        assert answers == ["Last<|im_end|>"]


LAST_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' }}"
    "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content and loop.last }}"
    "{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant:' if add_generation_prompt }}"
)


def test_a_template_that_shows_only_the_last_reasoning_gives_an_example_for_each_answer() -> None:
    first, second = (SAY | {"content": name, "reasoning_content": f"why {name}"} for name in ("One", "Two"))
    with renderer(LAST_THOUGHT) as renderer_:
        found = documents(renderer_, {"messages": [ASK, first, ASK, second]})
        assert all(isinstance(one, Document) for one in found)
        answers = [cut_text(one.text, one.parts)[1::2] for one in found if isinstance(one, Document)]
        assert answers == [["<think>why One</think>One<|im_end|>"], ["<think>why Two</think>Two<|im_end|>"]]
        assert "why One" not in cut_text(found[1].text, found[1].parts)[0]  # type: ignore[union-attr]
        assert not renderer_.unused


def test_answers_that_are_equal_in_the_text_of_the_template_are_no_pair() -> None:
    source = SIMPLE.replace("m.content", "m.content | trim")
    with renderer(source) as renderer_:
        record = {"prompt": "Ask", "chosen": "Say", "rejected": "Say "}
        [found] = documents(renderer_, record)
        assert isinstance(found, Rejection)
        assert found.reason is Reason.EQUAL_PAIR

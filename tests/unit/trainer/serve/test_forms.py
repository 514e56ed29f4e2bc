from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.inference.sampling import Sampling
from trainer.inference.sampling_options import SamplingOptions
from trainer.serve.forms import Answer, ChatRequest, CompletionRequest, Request, RequestError, Text

MESSAGES = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"prompt": "once"} | fields).encode())


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse(json.dumps({"messages": MESSAGES} | fields).encode())


def test_null_is_the_same_as_no_field() -> None:
    fields = dict.fromkeys((*SamplingOptions.model_fields, "model", "n", "stream", "stream_options", "logprobs", "tools"))
    assert completion(**fields) == completion()
    assert completion().sampling(SamplingOptions(temperature=0.3), 100) == completion(**fields).sampling(
        SamplingOptions(temperature=0.3), 100
    )


def test_values_of_a_request_replace_those_of_the_server() -> None:
    values = completion(temperature=0, stop=["a", "b"], seed=3, min_p=0.1).sampling(SamplingOptions(temperature=0.3, top_k=5), 100)
    assert Sampling(**values) == Sampling(16, temperature=0, stop=("a", "b"), seed=3, min_p=0.1, top_k=5)
    assert completion(stop="ab").stop == ("ab",)
    assert "seed" not in completion().sampling(SamplingOptions(), 100), "the server draws one"


def test_a_completion_without_a_length_has_16_tokens_and_a_chat_what_the_server_allows() -> None:
    assert completion().sampling(SamplingOptions(), 100)["max_tokens"] == 16
    assert completion().sampling(SamplingOptions(), 10)["max_tokens"] == 10
    assert chat().sampling(SamplingOptions(), 100)["max_tokens"] == 100
    assert chat(max_completion_tokens=7).max_tokens == chat(max_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature = -1: input should be greater than or equal to 0"),
        ({"temperature": "0.5"}, "temperature", "temperature = '0.5': input should be a valid number"),
        ({"top_p": 0}, "top_p", "top_p = 0: input should be greater than 0"),
        ({"max_tokens": True}, "max_tokens", "input should be a valid integer"),
        ({"max_tokens": 2.5}, "max_tokens", "input should be a valid integer"),
        ({"seed": -1}, "seed", "input should be greater than or equal to 0"),
        ({"n": 17}, "n", "n = 17: input should be less than or equal to 16"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": ["a" * 257]}, "stop", "at most 256"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"stop": 3}, "stop", "stop = 3: input should be a valid"),
        ({"prompt": [1, 2]}, "prompt", "valid string"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": ["a"] * 17}, "prompt", "at most 16"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"stream": 1}, "stream", "valid boolean"),
        ({"stream_options": {"a": 1}}, "stream_options", "include_usage alone"),
        ({"logprobs": 5}, "logprobs", "logprobs = 5: this server has no such function; leave logprobs out"),
        ({"logprobs": 0}, "logprobs", "no such function"),
        ({"echo": True}, "echo", "no such function"),
        ({"temprature": 1}, "temprature", "temprature is not a field of this request; did you mean temperature?; leave it out"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_should_be(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert message in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, param)
    assert json.loads(caught.value.to_json())["error"].keys() == {"message", "type", "param", "code"}


def test_a_field_that_asks_for_nothing_is_accepted() -> None:
    neutral = {"logprobs": False, "presence_penalty": 0.0, "tools": [], "user": "me", "response_format": {"type": "text"}, "n": 1}
    assert chat(**neutral).messages == MESSAGES


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "nested too deeply"),
        (b'{"prompt": "a", "prompt": "b"}', "there twice"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1]", "a JSON list"),
        (b'"a"', "a JSON str"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "a", "\\ud800": 1}', "lone surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        CompletionRequest.parse(body)
    assert caught.value.status == 400
    caught.value.to_json()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    [*ChatRequest.model_fields, *CompletionRequest.model_fields, "stream_options", "logprobs", "max_completion_tokens"]
)


@given(fields=st.dictionaries(_NAMES, _VALUES), kind=st.sampled_from([CompletionRequest, ChatRequest]))
def test_any_object_is_a_request_with_a_sampling_or_an_error_of_the_api(fields: dict[str, Any], kind: type[Request]) -> None:
    body = json.dumps(fields).encode(errors="surrogatepass")
    with suppress(RequestError):
        Sampling(**kind.parse(body).sampling(SamplingOptions(), 100))


def test_an_answer_has_the_form_of_the_api() -> None:
    texts = [Text("a b", "stop", 3), Text("c", "length", 2)]
    whole = json.loads(Answer(completion(n=2), "cmpl-1", 5, "first", texts, 4).whole())
    assert whole == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 5,
        "model": "first",
        "choices": [
            {"index": 0, "text": "a b", "logprobs": None, "finish_reason": "stop"},
            {"index": 1, "text": "c", "logprobs": None, "finish_reason": "length"},
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9},
    }
    choice = json.loads(Answer(chat(), "x", 5, "first", texts[:1]).whole())["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "a b", "refusal": None}


def test_the_last_chunks_have_the_usage_if_it_was_asked_for() -> None:
    def ends(**fields: Any) -> list[bytes]:
        return Answer(chat(stream=True, **fields), "x", 5, "first", [Text("a", "stop", 3)], 4).last_chunks().split(b"\n\n")

    assert ends() == [b"data: [DONE]", b""]
    usage, done, _ = ends(stream_options={"include_usage": True})
    assert done == b"data: [DONE]"
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["total_tokens"] == 7

"""The forms of OpenAI's API: requests for a completion or a chat, their answers in whole and in chunks, and errors.

Sources: https://platform.openai.com/docs/api-reference/completions and /chat. Bounds of sampling are those of `generate`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, ValidationError

from common.files import canonical_json, parse_json
from common.redaction import redacted_repr
from common.settings.messages import explain, nearest
from trainer.inference.sampling_options import SamplingOptions

MAX_TEXTS = 16  # of one request
_MAX_STOPS, _MAX_STOP_CHARS = 16, 256  # each token of a text is compared with all of them

_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")  # they do not concern the text
_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
"""Fields of the API that this program does not have, each with the value that asks for nothing."""


@dataclass
class RequestError(Exception):
    """An answer with an error, in the form of the API."""

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return canonical_json(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}, indent=None
        )


@dataclass
class Text:
    """A text while it is written."""

    content: str = ""
    finish_reason: str | None = None
    num_tokens: int = 0  # drawn, with the one that ends it


class Request(SamplingOptions):
    of_whole: ClassVar[str]
    of_chunk: ClassVar[str]
    prefix: ClassVar[str]  # of the ids
    prompt_field: ClassVar[str]
    usual_tokens: ClassVar[int | None] = None  # what the API gives a request that names no length; None: as many as are allowed

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_TEXTS, description="Number of texts for each prompt.")
    stream: bool = False
    include_usage: bool = False
    stop: tuple[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)], ...] = Field((), max_length=_MAX_STOPS)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        try:
            values = parse_json(body, unique=True)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON that can be read: {error}; send one JSON object") from None
        if not isinstance(values, dict):
            raise RequestError(f"the body is a JSON {type(values).__name__}; send a JSON object")
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body contains a lone surrogate, which is not text; send valid Unicode") from None
        given = cls._translated({name: value for name, value in values.items() if value is not None and name not in _LABELS})
        if unknown := [name for name in given if name not in cls.model_fields]:
            similar = nearest(unknown[0], list(cls.model_fields))
            raise RequestError(f"{unknown[0][:60]} is not a field of this request{similar}; leave it out", param=unknown[0][:60])
        if cls.prompt_field not in given:
            raise RequestError(f"{cls.prompt_field} is missing; it holds the text to answer", param=cls.prompt_field)
        try:
            return cls.model_validate(given, strict=True)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise RequestError(explain(cls, error).replace(f"--{name}", name), param=name) from None

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name, neutral in _NEUTRAL.items():
            if name in values and ((value := values.pop(name)) != neutral or isinstance(value, bool) != isinstance(neutral, bool)):
                raise RequestError(
                    f"{name} = {redacted_repr(value)}: this server has no such function; leave {name} out", param=name
                )
        options = values.pop("stream_options", {})
        if not isinstance(options, dict) or not options.keys() <= {"include_usage", "include_obfuscation"}:
            raise RequestError("stream_options has include_usage alone; correct it", param="stream_options")
        values |= {"include_usage": options["include_usage"]} if options.get("include_usage") is not None else {}
        for name in ("stop", "prompt"):
            if isinstance(value := values.get(name), str | list):
                values[name] = (value,) if isinstance(value, str) else tuple(value)
        return values

    @property
    def num_prompts(self) -> int:
        return 1

    def sampling(self, advice: SamplingOptions, max_tokens: int) -> dict[str, Any]:
        """Return the values for `Sampling` but for a seed that is not given."""
        given = self.model_dump(include=set(SamplingOptions.model_fields) & self.model_fields_set)
        return advice.model_dump(exclude={"seed"}) | {"max_tokens": min(self.usual_tokens or max_tokens, max_tokens)} | given

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def first_deltas(self) -> list[dict[str, Any]]:
        return []


class CompletionRequest(Request):
    of_whole = of_chunk = "text_completion"
    prefix, prompt_field, usual_tokens = "cmpl", "prompt", 16

    prompt: tuple[str, ...] = Field(min_length=1, max_length=MAX_TEXTS)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        return self.delta(index, text.content, text.finish_reason)

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatRequest(Request):
    of_whole, of_chunk = "chat.completion", "chat.completion.chunk"
    prefix, prompt_field = "chatcmpl", "messages"

    messages: list[Any] = Field(min_length=1)

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._translated(values)
        newer = values.pop("max_completion_tokens", None)
        if newer is not None and values.setdefault("max_tokens", newer) != newer:
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        return values

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        message = {"role": "assistant", "content": text.content, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": text.finish_reason}

    def delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": finish_reason}

    def first_deltas(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": role, "logprobs": None, "finish_reason": None} for index in range(self.n)]


@dataclass
class Answer:
    """The answer to one request, in whole or in chunks."""

    request: Request
    id: str
    created: int  # in seconds since 1970
    model: str
    texts: list[Text]
    num_prompt_tokens: int = 0

    def usage(self) -> dict[str, int]:
        written = sum(text.num_tokens for text in self.texts)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.num_prompt_tokens + written,
        }

    def whole(self) -> bytes:
        choices = [self.request.choice(index, text) for index, text in enumerate(self.texts)]
        return self._json(self.request.of_whole, choices, {"usage": self.usage()})

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return sse(self._json(self.request.of_chunk, [choice], {"usage": None} if self.request.include_usage else {}))

    def last_chunks(self) -> bytes:
        usage = self._json(self.request.of_chunk, [], {"usage": self.usage()})
        return (sse(usage) if self.request.include_usage else b"") + sse(b"[DONE]")

    def _json(self, kind: str, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return canonical_json(head | more, indent=None)


def sse(data: bytes) -> bytes:
    """Return an event of a stream; `data` is one line."""
    return b"data: " + data.strip() + b"\n\n"

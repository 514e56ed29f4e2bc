"""The HTTP side: routes, limits, and who may ask. aiohttp reads the requests; the worker's thread writes the texts.

Without a token, only this machine can connect, and a request must name it in `Host`. A page of another site whose name leads to
this machine (DNS rebinding) names that site there. No answer allows other origins. A body must be declared as JSON, which a page of
another origin cannot do without asking first.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from common.html.page import render_page, template_environment
from data_pipeline.conversations.messages import MessagesError, read_messages
from trainer.inference.conversation import Chat
from trainer.inference.sampling import Sampling
from trainer.inference.sampling_options import SamplingOptions
from trainer.inference.text_model import Piece, TextModel
from trainer.serve.forms import MAX_TEXTS, Answer, ChatRequest, CompletionRequest, Request, RequestError, Text, sse
from trainer.serve.worker import Event, Full, Job, Started, Worker

_MAX_BODY_BYTES = 1 << 20
_MAX_CONNECTIONS = 512
_READ_S = _SEND_S = 30.0  # for a request to arrive, and for an answer to be taken
_LINGER_S = 2.0  # for the rest of a body that is refused, which a client sends before it reads the answer
_STOP_S = 0.1  # for short answers once a signal has come
_RETRY_AFTER_S = 5
_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "trainer",
    "X-Content-Type-Options": "nosniff",
}
_PATHS = ("/", "/health", "/v1/models", "/v1/completions", "/v1/chat/completions")
_HERE = Path(__file__).parent
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    name: str
    model: TextModel
    chat: Chat | None
    advice: SamplingOptions
    created: int


@dataclass(frozen=True)
class Limits:
    max_tokens: int
    timeout_s: float
    turns: int
    waiting: int


class Service:
    """Answers requests. `token`: what they must carry; None if only this machine can connect."""

    def __init__(self, served: ServedModel, limits: Limits, token: str | None) -> None:
        self._served, self._limits, self._token = served, limits, token
        self._worker = Worker(served.model, limits.turns, limits.waiting)
        page = render_page(template_environment(_HERE), "try.jinja", program=_HERE / "try.js").encode()
        self._shown: dict[str, Callable[[], web.StreamResponse]] = {
            "/": lambda: web.Response(body=page, content_type="text/html", charset="utf-8"),
            "/health": lambda: as_json({"status": "ok", "texts": self._worker.num_jobs}),
            "/v1/models": lambda: as_json({"object": "list", "data": [self._description()]}),
            f"/v1/models/{served.name}": lambda: as_json(self._description()),
        }
        self._answered: dict[str, type[Request]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._check_origin(request)
            if request.path not in self._shown.keys() | self._answered.keys():
                raise RequestError(f"there is no {request.path[:100]!r}; this server has {', '.join(_PATHS)}", 404)
            if request.method not in (methods := ("GET", "HEAD") if request.path in self._shown else ("POST",)):
                allow = (("Allow", methods[0]),)
                raise RequestError(f"{request.method[:20]} is not a method of {request.path}; use {methods[0]}", 405, headers=allow)
            if request.path.startswith("/v1/"):
                self._check_token(request)
            if request.path in self._shown:
                response = self._shown[request.path]()
            else:
                response = await self._answer(request, self._answered[request.path])
        except RequestError as error:
            response = failed(error)
        return await sent(request, response)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)

    def _check_origin(self, request: web.BaseRequest) -> None:
        if self._token is not None:  # no page of another site has it
            return
        host = request.headers.getall("Host", [])
        if not (len(host) == 1 and _LOCAL.fullmatch(host[0])):
            raise RequestError("the header Host names another machine; use http://127.0.0.1, or start the server with a token", 403)
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != host[0]:
            raise RequestError("the request comes from a page of another site, which may not use this server", 403)

    def _check_token(self, request: web.BaseRequest) -> None:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._token is not None and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise RequestError(
                "the header Authorization has no valid token; send `Authorization: Bearer TOKEN`",
                *(401, None, "invalid_api_key", (("WWW-Authenticate", "Bearer"),)),
            )

    def _description(self) -> dict[str, Any]:
        served = self._served
        own = {"context": served.model.context, "max_tokens": self._limits.max_tokens, "has_chat": served.chat is not None}
        advice = served.advice.model_dump(include={"temperature"})
        return {"id": served.name, "object": "model", "created": served.created, "owned_by": "trainer"} | own | advice

    async def _answer(self, request: web.BaseRequest, kind: type[Request]) -> web.StreamResponse:
        asked = kind.parse(await read_body(request))
        jobs, events = self._submitted(asked)
        head = secrets.token_hex(12), int(time.time()), self._served.name
        answer = Answer(asked, f"{asked.prefix}-{head[0]}", *head[1:], [Text() for _ in jobs])
        response: web.StreamResponse | None = None
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                async for index, piece in self._pieces(answer, events):
                    if not asked.stream:
                        continue
                    if response is None:
                        response = await opened_stream(request, answer)
                    if piece.text:
                        await response.write(answer.chunk(asked.delta(index, piece.text, None)))
                    if reason := answer.texts[index].finish_reason:
                        await response.write(answer.chunk(asked.delta(index, "", reason)))
                if response is None:
                    return web.Response(body=answer.whole(), content_type="application/json")
                await response.write(answer.last_chunks())
        except TimeoutError:
            error = RequestError(
                f"the answer took more than {self._limits.timeout_s:g} s; ask for fewer max_tokens, or start with more --timeout_s",
                *(504, None, "timeout", (("x-should-retry", "false"),)),
            )
            if response is None:
                raise error from None
            await ended(request, response, error)
        except RequestError as error:
            if response is None:
                raise
            await ended(request, response, error)
        finally:
            self._worker.cancel(jobs)
        return response

    def _submitted(self, asked: Request) -> tuple[list[Job], asyncio.Queue[tuple[int, Event]]]:
        served, limits = self._served, self._limits
        if asked.model not in (None, served.name):
            raise RequestError(
                f"model = {asked.model[:60]!r}: this server has {served.name!r} alone", 404, "model", "model_not_found"
            )
        if isinstance(asked, ChatRequest) and served.chat is None:
            raise RequestError(
                "the data of this model has no chat template; use /v1/completions, or serve a run that was trained on conversations"
            )
        values = asked.sampling(served.advice, limits.max_tokens)
        if values["max_tokens"] > limits.max_tokens:
            raise RequestError(
                f"max_tokens = {values['max_tokens']}: this server writes at most {limits.max_tokens}; ask for fewer",
                param="max_tokens",
            )
        sampling = Sampling(**{"seed": secrets.randbelow(1 << 63)} | values)
        num_texts = asked.num_prompts * asked.n
        if num_texts > (most := min(MAX_TEXTS, self._worker.capacity)):
            raise RequestError(f"the request asks for {num_texts} texts, and {most} are possible; send several requests")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def job(index: int) -> Job:
            def deliver(event: Event) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

            return Job(lambda: self._prepared(asked, sampling, index // asked.n), index, deliver)

        jobs = [job(index) for index in range(num_texts)]
        try:
            self._worker.submit(jobs)
        except Full:
            raise RequestError(
                "the queue is full; send the request again later",
                *(429, None, "queue_full", (("Retry-After", str(_RETRY_AFTER_S)),)),
            ) from None
        return jobs, events

    def _prepared(self, asked: Request, sampling: Sampling, number: int) -> tuple[list[int], Sampling]:
        """Return the tokens before a text, and its sampling. Runs in the worker's thread, because templates and texts take time."""
        model, chat = self._served.model, self._served.chat
        if isinstance(asked, ChatRequest) and chat is not None:
            try:
                tokens, sampling = chat.asked(read_messages(asked.messages), sampling)
            except MessagesError as error:
                raise RequestError(f"the conversation cannot be answered: {error}", param="messages") from None
        else:
            assert isinstance(asked, CompletionRequest)
            tokens = model.prompt_tokens(asked.prompt[number])
        if len(tokens) > model.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, and the model sees at most {model.context}; shorten it",
                *(400, asked.prompt_field, "context_length_exceeded"),
            )
        return tokens, sampling

    async def _pieces(self, answer: Answer, events: asyncio.Queue[tuple[int, Event]]) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of all texts as they come, once `answer` has them."""
        unfinished = len(answer.texts)
        counted: set[int] = set()  # prompts, whose tokens count once for all texts that continue them
        while unfinished:
            index, event = await events.get()
            if isinstance(event, RequestError):
                raise event
            if isinstance(event, Started):
                prompt = index // answer.request.n
                answer.num_prompt_tokens += 0 if prompt in counted else event.num_prompt_tokens
                counted.add(prompt)
                continue
            text = answer.texts[index]
            text.content += event.text
            text.num_tokens += 1
            if event.finish_reason is not None:
                text.finish_reason = "length" if event.finish_reason == "length" else "stop"
                unfinished -= 1
            yield index, event


def as_json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(value).encode() + b"\n", content_type="application/json")


def failed(error: RequestError) -> web.Response:
    return web.Response(body=error.to_json(), status=error.status, headers=dict(error.headers), content_type="application/json")


async def read_body(request: web.BaseRequest) -> bytes:
    too_large = RequestError(f"the body is larger than {_MAX_BODY_BYTES} bytes; shorten it", 413)
    if request.content_type != "application/json" or "Content-Encoding" in request.headers:
        raise RequestError("the body must be plain JSON; send `Content-Type: application/json` and no Content-Encoding", 415)
    if (request.content_length or 0) > _MAX_BODY_BYTES:
        raise too_large
    try:
        async with asyncio.timeout(_READ_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except TimeoutError:
        raise RequestError(f"the body took more than {_READ_S:g} s; send it faster", 408) from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}; correct the headers of the request") from None


async def opened_stream(request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for delta in answer.request.first_deltas():
        await response.write(answer.chunk(delta))
    return response


async def ended(request: web.BaseRequest, response: web.StreamResponse, error: RequestError) -> None:
    """End a stream whose status was sent already with an error."""
    try:
        async with asyncio.timeout(1):
            await response.write(sse(error.to_json()))
    except TimeoutError:  # the client does not read
        close(request)


async def sent(request: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
    """Send the rest of a response, or close the connection of a client that does not read it."""
    if not response.prepared:
        response.headers.update(_HEADERS)
    try:
        async with asyncio.timeout(_SEND_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        close(request)
    return response


def close(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


class _Connection(RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            if not isinstance(exc, ConnectionError):  # a client that has gone
                _log.error("a request could not be answered", exc_info=exc)
            error = RequestError("the request could not be answered; the log of the server says why", status)
        else:
            first = " ".join((message or "").split())[:200]
            error = RequestError(f"the request is not HTTP/1.1 that can be read: {first}; correct it", status)
        response = failed(error)
        response.headers.update(_HEADERS)
        response.force_close()
        return response


class _Server(web.Server):
    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()

    def __call__(self) -> RequestHandler:
        # A connection that sends no whole head in `keepalive_timeout` is closed.
        limits = {"keepalive_timeout": _READ_S, "lingering_time": _LINGER_S, "auto_decompress": False, "access_log": None}
        return _Connection(self, loop=self._loop, **limits)  # type: ignore[arg-type]


@asynccontextmanager
async def running(service: Service, listening: socket.socket) -> AsyncIterator[None]:
    """Answer requests within the context. What is not answered at its end is cut off."""
    runner = web.ServerRunner(_Server(service.handle, handler_cancellation=True), shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        yield
    finally:
        await runner.cleanup()
        await service.close()


async def serve(service: Service, listening: socket.socket, announce: Callable[[], object]) -> None:
    """Answer requests until SIGINT, SIGTERM or SIGHUP."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, stopped.set)
    async with running(service, listening):
        announce()
        await stopped.wait()

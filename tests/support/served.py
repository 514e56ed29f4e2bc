"""The server of `trainer serve`: in a thread of this process with a small model, or as a process with a run. And a plain client."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.conversations.rendering import ChatRenderer
from data_pipeline.tokenizer import ByteTokenizer
from tests.support.runs import ROOT
from trainer.config import ModelConfig
from trainer.inference.conversation import Chat
from trainer.inference.sampling_options import SamplingOptions
from trainer.inference.text_model import TextModel
from trainer.model.decoder import build_model
from trainer.serve.server import Limits, ServedModel, Service, running

CONTEXT = 64
LIMITS = Limits(max_tokens=100_000, timeout_s=120, turns=2, waiting=8)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}[end]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def small_model() -> TextModel:
    """A model whose texts depend on what stands before, and end only by their length or a stop text."""
    tokenizer = ByteTokenizer()
    shape = ModelConfig(layers=2, width=32, heads=4, context=CONTEXT, init_std=0.3)
    return TextModel(build_model(shape, tokenizer.vocab_size, seed=0).eval(), _WithoutEnd(), CONTEXT)


class _WithoutEnd(ByteTokenizer):
    @property
    def end_ids(self) -> list[int]:
        return []


@dataclass
class Client:
    port: int
    token: str | None = None

    def raw(self, data: bytes, *, timeout_s: float = 60) -> bytes:
        """Send bytes, and return all that comes until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            connection.sendall(data)
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
            return b"".join(parts)

    def ask(self, path: str, fields: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Return status, JSON and headers of the answer; a request with fields is a POST."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        body = fields if fields is None or isinstance(fields, bytes) else json.dumps(fields).encode()
        connection.request("GET" if body is None else "POST", path, body, sent)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        is_json = answer.getheader("Content-Type", "").startswith("application/json")
        return answer.status, json.loads(content) if is_json else content.decode(), dict(answer.getheaders())

    def text(self, **fields: Any) -> str:
        status, answer, _ = self.ask("/v1/completions", fields)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    def events(self, path: str, fields: dict[str, Any]) -> list[Any]:
        status, content, headers = self.ask(path, fields | {"stream": True})
        assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), content
        *events, done, end = content.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def started(self, **fields: Any) -> socket.socket:
        """Ask for a stream that is not read to its end, and return the connection once its first bytes are there."""
        body = json.dumps({"prompt": "once", "max_tokens": 100_000, "stream": True} | fields).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(post("/v1/completions", body))
        first = connection.recv(1000)
        if not first.startswith(b"HTTP/1.1 200 OK"):
            connection.close()
            raise AssertionError(first)
        return connection

    def num_texts(self) -> int:
        found: int = self.ask("/health")[1]["texts"]
        return found

    def wait_until_idle(self) -> None:
        while self.num_texts():
            pass


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def served(model: TextModel, limits: Limits = LIMITS, *, template: str | None = None, token: str | None = None) -> Iterator[Client]:
    """Serve a model under the name `little` while the context is open."""
    listening = socket.create_server(("127.0.0.1", 0))
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def answer(chat: Chat | None) -> None:
        service = Service(ServedModel("little", model, chat, SamplingOptions(), 7), limits, token)
        async with running(service, listening):
            ready.set()
            await stop.wait()

    def work() -> None:
        if template is None:
            loop.run_until_complete(answer(None))
            return
        with ChatRenderer(ChatTemplate.of(template, model.tokenizer)) as renderer:
            loop.run_until_complete(answer(Chat(model, renderer, None, "[end]", None)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(60)
        yield Client(listening.getsockname()[1], token)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        listening.close()


@contextmanager
def command(run: Path, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """Start `trainer serve` for a run on a free port, and wait for its line with the address."""
    line = [sys.executable, "-m", "trainer", "serve", str(run), "--port", "0", *words]
    own = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stdout.readline()
        found = re.fullmatch(r"(\S+) is served at http://(\S+):(\d+)/ until Ctrl-C\n", said)
        assert found, said + process.stderr.read()
        yield process, Client(int(found[3]), environment.get("SERVE_TOKEN"))
    finally:
        process.kill()
        process.communicate()


def resident_bytes(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert found
    return int(found[1]) << 10

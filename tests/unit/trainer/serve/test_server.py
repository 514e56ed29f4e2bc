"""The server over loopback: answers in the form of OpenAI's API, limits, hostile requests, and clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from common.errors import CheckpointError
from tests.support.served import CONTEXT, TEMPLATE, Client, post, served, small_model
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel
from trainer.serve import server
from trainer.serve.server import Limits

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = small_model()
TOKEN = "a-token-of-a-test-0123456789"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"prompt": "once", "max_tokens": 12, "seed": 5}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(MODEL) as found:
        yield found


@pytest.fixture(scope="module")
def talker() -> Iterator[Client]:
    with served(MODEL, template=TEMPLATE) as found:
        yield found


def alone(prompt: str, sampling: Sampling, row: int = 0) -> str:
    return MODEL.complete([prompt], sampling, first_row=row)[0].text


def error_of(answer: tuple[int, Any, dict[str, str]], status: int) -> dict[str, Any]:
    assert answer[0] == status, answer[1]
    assert answer[2]["Content-Type"].startswith("application/json")
    error: dict[str, Any] = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_the_model_is_listed_with_what_a_client_needs(client: Client, talker: Client) -> None:
    status, found, _ = client.ask("/v1/models")
    assert (status, found["object"]) == (200, "list")
    [model] = found["data"]
    assert (model["id"], model["object"], model["created"], model["context"]) == ("little", "model", 7, CONTEXT)
    assert client.ask("/v1/models/little")[1] == model
    assert [one.ask("/v1/models/little")[1]["has_chat"] for one in (client, talker)] == [False, True]


def test_a_completion_is_the_text_that_generate_writes(client: Client) -> None:
    status, answer, _ = client.ask(COMPLETIONS, ASKED | {"model": "little"})
    text = alone("once", Sampling(12, temperature=0.8, seed=5))
    assert status == 200
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    prompt = len(MODEL.prompt_tokens("once"))
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "little", "cmpl-")


def test_several_prompts_and_several_texts_of_each_are_rows_as_in_generate(client: Client) -> None:
    answer = client.ask(COMPLETIONS, ASKED | {"prompt": ["once", "a"], "n": 2})[1]
    prompts = ["once", "once", "a", "a"]
    expected = [alone(prompt, Sampling(12, temperature=0.8, seed=5), row) for row, prompt in enumerate(prompts)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == len(MODEL.prompt_tokens("once")) + len(MODEL.prompt_tokens("a"))


def test_a_stream_has_the_same_text_and_ends_with_the_usage(client: Client) -> None:
    events = client.events(COMPLETIONS, ASKED | {"n": 2, "stream_options": {"include_usage": True}})
    whole = client.ask(COMPLETIONS, ASKED | {"n": 2})[1]
    *chunks, last = events
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({event["id"] for event in events}) == 1


def test_a_stop_text_ends_a_text_and_no_piece_of_a_stream_has_a_part_of_it(client: Client) -> None:
    text = client.text(**ASKED | {"max_tokens": 40})
    stop = text[10:13]
    expected = text[: text.find(stop)]
    answer = client.ask(COMPLETIONS, ASKED | {"max_tokens": 40, "stop": [stop, "never seen"]})[1]["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
    events = client.events(COMPLETIONS, ASKED | {"max_tokens": 40, "stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_without_a_seed_texts_differ(client: Client) -> None:
    assert len({client.text(prompt="once", max_tokens=30) for _ in range(3)}) == 3


def test_a_seed_gives_the_same_text_whatever_else_is_written(client: Client) -> None:
    asked = ASKED | {"max_tokens": 60}
    expected = alone("once", Sampling(60, temperature=0.8, seed=5))
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(client.text, prompt="a" * (3 + number), max_tokens=40, seed=number) for number in range(4)]
        mine = [pool.submit(client.text, **asked) for _ in range(3)]
        assert {one.result() for one in mine} == {expected}
        assert len({one.result() for one in others}) == 4


def test_a_chat_answers_with_the_template_of_the_run(talker: Client) -> None:
    prompt = "[system]Be brief.[user]Hello[assistant]"
    asked = {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES], "max_tokens": 15, "seed": 5}
    answer = talker.ask(CHAT, asked)[1]
    text = "".join(MODEL.stream_after(MODEL.tokenizer.encode(prompt), Sampling(15, temperature=0.8, seed=5)))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    chunks = [event["choices"][0] for event in talker.events(CHAT, asked)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text
    assert (chunks[-1]["delta"], chunks[-1]["finish_reason"]) == ({}, "length")
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert (
        talker.ask(CHAT, asked | {"messages": [asked["messages"][0], {"role": "user", "content": parts}]})[1]["choices"]
        == answer["choices"]
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "the content of messages[0] is missing"),
        ([{"role": "nobody", "content": "a"}], "messages[0] has the role 'nobody'; the roles are system"),
        (["a"], "messages[0] is a text, but an object with role and content is expected"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "of type 'image_url'"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": "a"}], "no tools"),
        ([{"role": "user", "content": "a" * CONTEXT}], "the model sees at most 64; shorten it"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_an_error_that_says_why(
    talker: Client, messages: list[Any], message: str
) -> None:
    for more in ({}, {"stream": True}):
        error = error_of(talker.ask(CHAT, {"messages": messages} | more), 400)
        assert message in error["message"]
        assert (error["param"], error["type"]) == ("messages", "invalid_request_error")


def test_a_model_without_a_template_names_completions(client: Client) -> None:
    assert "no chat template; use /v1/completions" in error_of(client.ask(CHAT, {"messages": MESSAGES}), 400)["message"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "gpt-5"}, 404, "model = 'gpt-5': this server has 'little' alone"),
        ({"max_tokens": 100_001}, 400, "max_tokens = 100001: this server writes at most 100000"),
        ({"prompt": "a" * CONTEXT}, 400, "the prompt has 65 tokens, and the model sees at most 64; shorten it"),
        ({"prompt": ["a"] * 6, "n": 2}, 400, "the request asks for 12 texts, and 10 are possible"),
        ({"temperature": -1}, 400, "greater than or equal to 0"),
        (b"{", 400, "the body is not JSON"),
        (b" " * (1 << 20) + b"{}", 413, "the body is larger than 1048576 bytes"),
    ],
)
def test_a_request_outside_of_the_limits_is_an_error_that_says_what_to_do(
    client: Client, fields: dict[str, Any] | bytes, status: int, message: str
) -> None:
    asked = fields if isinstance(fields, bytes) else ASKED | fields
    assert message in error_of(client.ask(COMPLETIONS, asked), status)["message"]
    assert client.text(**ASKED)


def test_values_at_the_edge_of_their_bounds_give_a_text(client: Client) -> None:
    edges: list[dict[str, Any]] = [
        *({"temperature": value} for value in (0, 1e-300, 1e300)),
        *({"top_k": value} for value in (1, 10**9, 10**30)),
        *({"top_p": value} for value in (1e-300, 1)),
        *({"min_p": value} for value in (0, 1)),
        *({"repetition_penalty": value} for value in (1e-3, 1e300)),
        {"seed": (1 << 63) - 1},
        {"prompt": ""},
        {"prompt": "\x00é😀"},
    ]
    for edge in edges:
        status, answer, _ = client.ask(COMPLETIONS, ASKED | edge)
        assert status in (200, 400), (edge, answer)


def test_paths_and_methods_that_do_not_exist_are_errors(client: Client) -> None:
    for path in ("/v1", "/v2/models", "/../../etc/passwd", "/v1/models/other", "/%2e%2e/etc/passwd", "/static/x.js", "//"):
        assert "there is no" in error_of(client.ask(path), 404)["message"]
    answer = client.ask(COMPLETIONS)
    assert error_of(answer, 405)["message"] == "GET is not a method of /v1/completions; use POST"
    assert answer[2]["Allow"] == "POST"
    assert client.raw(b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 405 "
    )
    assert client.raw(b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example"},
        {"Host": "10.0.0.1"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
    ],
)
def test_a_page_of_another_site_can_use_nothing(client: Client, headers: dict[str, str]) -> None:
    for path, fields in (("/", None), ("/health", None), ("/v1/models", None), (COMPLETIONS, ASKED)):
        answer = client.ask(path, fields, **headers)
        error_of(answer, 403)
        assert not [name for name in answer[2] if name.lower().startswith("access-control")]


def test_names_of_this_machine_are_accepted(client: Client) -> None:
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8000"):
        assert client.ask("/health", Host=host)[0] == 200
    assert client.ask("/health", Host="localhost:80", Origin="http://localhost:80")[0] == 200


def test_a_body_that_a_form_of_a_page_could_send_is_refused(client: Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
        assert "must be plain JSON" in error_of(client.ask(COMPLETIONS, ASKED, Content_Type=kind), 415)["message"]
    error_of(client.ask(COMPLETIONS, b"x", Content_Encoding="gzip"), 415)


def test_no_answer_is_stored_sniffed_or_framed(client: Client) -> None:
    for path, fields in (("/", None), ("/nothing", None), (COMPLETIONS, ASKED), (COMPLETIONS, ASKED | {"stream": True})):
        headers = client.ask(path, fields)[2]
        assert (headers["Cache-Control"], headers["X-Content-Type-Options"], headers["Server"]) == (
            "no-store",
            "nosniff",
            "trainer",
        )
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_with_a_token_only_the_page_and_the_health_are_open() -> None:
    with served(MODEL, token=TOKEN) as client:
        assert client.text(**ASKED)
        assert client.ask("/health", Host="model.example")[0] == 200, "the token protects, also behind a proxy with another name"
        open_client = Client(client.port)
        assert [open_client.ask(path)[0] for path in ("/", "/health")] == [200, 200]
        assert b"little" not in open_client.raw(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        for given in (
            {},
            *(
                {"Authorization": value}
                for value in ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é")
            ),
        ):
            for path, fields in (("/v1/models", None), ("/v1/models/little", None), (COMPLETIONS, ASKED), (CHAT, ASKED)):
                answer = open_client.ask(path, fields, **given)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer[2]["WWW-Authenticate"] == "Bearer"
                assert TOKEN not in json.dumps(answer[1])


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http_gets_an_error_and_is_closed(client: Client, data: bytes) -> None:
    answer = client.raw(data)
    assert answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.0 4"), answer[:100]
    assert "is not HTTP/1.1 that can be read" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert client.text(**ASKED)


def test_a_body_in_chunks_is_read_up_to_the_limit(client: Client) -> None:
    head = post(COMPLETIONS, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    answer = client.raw(head + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 20 + b"0\r\n\r\n" + b"GET / HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_slow_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_READ_S", 0.3)
    with served(MODEL) as client:
        assert client.raw(b"") == b""
        assert client.raw(b"GET / HTTP/1.1\r\nHost: loc") == b""
        assert b" 408 " in client.raw(post(COMPLETIONS, b'{"prompt": "a"}').replace(b"Length: 15", b"Length: 99"))[:20]


def test_connections_beyond_the_most_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 2)
    with served(MODEL) as client:
        first, second = client.started(), client.started()
        with pytest.raises(ConnectionError):
            client.ask("/health")
        first.close()
        second.close()
        while True:
            with suppress(ConnectionError):
                client.wait_until_idle()
                break
        assert client.text(**ASKED)


def test_a_client_that_leaves_ends_its_text_and_makes_room(client: Client) -> None:
    streams = [client.started() for _ in range(2)]
    waiting = [threading.Thread(target=lambda: client.text(**ASKED)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while client.num_texts() < 4:
        pass
    for stream in streams:
        stream.close()
    for thread in waiting:
        thread.join()
    client.wait_until_idle()


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_ends_it(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    connection.request("POST", COMPLETIONS, json.dumps(ASKED | {"max_tokens": 100_000}), {"Content-Type": "application/json"})
    while not client.num_texts():
        pass
    connection.close()
    client.wait_until_idle()


def test_clients_that_leave_before_their_answer_are_no_errors_of_the_program(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(post(COMPLETIONS, json.dumps(ASKED | {"max_tokens": 200_000}).encode()))
    client.wait_until_idle()
    assert caplog.records == []


def test_a_full_queue_answers_429_with_a_time() -> None:
    with served(MODEL, Limits(100_000, 120, turns=1, waiting=1)) as client:
        streams = [client.started()]
        waiting = http.client.HTTPConnection("127.0.0.1", client.port)
        waiting.request("POST", COMPLETIONS, json.dumps(ASKED), {"Content-Type": "application/json"})
        while client.num_texts() < 2:
            pass
        answer = client.ask(COMPLETIONS, ASKED)
        error = error_of(answer, 429)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert int(answer[2]["Retry-After"]) > 0
        streams[0].close()
        assert waiting.getresponse().status == 200
        waiting.close()


def test_an_answer_that_takes_too_long_is_an_error_and_its_text_ends() -> None:
    with served(MODEL, Limits(100_000, 0.5, turns=1, waiting=1)) as client:
        answer = client.ask(COMPLETIONS, ASKED | {"max_tokens": 100_000})
        assert "took more than 0.5 s; ask for fewer max_tokens" in error_of(answer, 504)["message"]
        assert answer[2]["x-should-retry"] == "false"
        status, stream, _ = client.ask(COMPLETIONS, ASKED | {"max_tokens": 100_000, "stream": True})
        *chunks, last, end = stream.split("\n\n")
        assert (status, end) == (200, "")
        assert len(chunks) > 1
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        client.wait_until_idle()


def test_a_client_that_does_not_read_its_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(_self: TextModel, *_arguments: Any) -> Iterator[Any]:
        while True:
            yield server.Piece("x" * (1 << 20), None)

    monkeypatch.setattr(TextModel, "pieces_after", pieces)
    with served(MODEL, Limits(100_000, 1.0, turns=1, waiting=1)) as client:
        connection = client.started()
        client.wait_until_idle()
        with suppress(ConnectionError):
            while connection.recv(1 << 20):
                pass
        connection.close()


def test_a_model_that_cannot_be_used_is_an_error_also_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TextModel.pieces_after

    def broken(self: TextModel, *arguments: Any) -> Iterator[Any]:
        yield next(whole(self, *arguments))
        raise CheckpointError("the logits of the model are not finite")

    monkeypatch.setattr(TextModel, "pieces_after", broken)
    with served(MODEL) as client:
        assert "not finite" in error_of(client.ask(COMPLETIONS, ASKED), 500)["message"]
        content = client.ask(COMPLETIONS, ASKED | {"stream": True})[1]
        assert "not finite" in json.loads(content.split("\n\n")[-2].removeprefix("data: "))["error"]["message"]


def test_an_error_of_the_program_is_logged_and_says_nothing_of_it_to_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("internal name")

    monkeypatch.setattr(server.Service, "_description", broken)
    with served(MODEL) as client:
        error = error_of(client.ask("/v1/models"), 500)
    assert error["message"] == "the request could not be answered; the log of the server says why"
    assert "internal name" in caplog.text

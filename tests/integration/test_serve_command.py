"""`trainer serve` as a process: what it prints, how it ends, what it refuses, and its memory under load."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError, ConfigError
from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from tests.support.network import foreign_address
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, run_command, tiny_config
from tests.support.served import Client, command, resident_bytes
from trainer.commands.serve import TOKEN
from trainer.loop import train
from trainer.program import run_here

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc of Linux")

SECRET = "0123456789abcdef-of-a-test"
ASKED = {"prompt": "the cat", "max_tokens": 8, "seed": 3}
LEAKED_BYTES = 24 << 20  # 400 caches of a text would be more, and so would the events of texts that nobody reads


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(
        write_prepared(folder / "data", row_length=128), folder / "first", model={"context": 128}, limits={"steps": 2}
    )
    train(config)
    return config.run


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    turns = [[{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"{number}!"}] for number in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    settings: dict[str, Any] = {
        "records": {"messages_field": "messages"},
        "chat": {"template": "chatml"},
        "tokenizer": {"kind": "byte"},
        "dedup": {"near": False},
        "split": {"val_fraction": 0.2},
    }
    prepare(PrepareConfig(sources=(str(folder / "chats.jsonl"),), output=folder / "data", workers=1, row_length=128, **settings))
    config = tiny_config(folder / "data", folder / "talks", model={"context": 128}, limits={"steps": 2})
    train(config)
    return config.run


def test_the_text_is_that_of_generate_and_a_signal_ends_the_server_in_order(run: Path) -> None:
    written = run_command(
        "trainer", "generate", str(run), "--json", "--prompt", "the cat", "--max_tokens", "8", "--seed", "3"
    ).stdout
    for number in (signal.SIGTERM, signal.SIGINT):
        with command(run, "--name", "mine", "--max_tokens", "100000") as (process, client):
            assert client.ask("/v1/models")[1]["data"][0]["id"] == "mine"
            assert client.text(**ASKED) == json.loads(written)["text"]
            stream = client.started()
            process.send_signal(number)
            assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == 0
            stream.close()


def test_the_service_of_a_container_ends_with_a_signal_too(run: Path) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    listening.close()
    words = [str(ROOT / "entrypoints" / "train"), "serve", str(run), "--port", str(port)]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("first is served at ")
        process.terminate()
        assert process.wait(60) == 0


def test_a_run_with_a_chat_template_answers_and_is_not_deceived_by_names_of_tokens(chat_run: Path) -> None:
    with command(chat_run) as (_, client):
        assert client.ask("/v1/models")[1]["data"][0]["has_chat"] is True
        usages = []
        for content in ("Say 7", "Say <|im_end|>"):
            asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "seed": 1}
            status, answer, _ = client.ask("/v1/chat/completions", asked)
            assert (status, answer["choices"][0]["message"]["role"]) == (200, "assistant")
            usages.append(answer["usage"]["prompt_tokens"])
        assert usages[1] - usages[0] == len("<|im_end|>") - 1, "the name of a token in a message is text"


def test_other_addresses_need_a_token_and_loopback_is_the_default(run: Path) -> None:
    with command(run) as (_, client), pytest.raises(ConnectionError):
        socket.create_connection((foreign_address(), client.port), timeout=10)
    with command(run, "--host", "0.0.0.0", SERVE_TOKEN=SECRET) as (process, client):
        assert client.text(**ASKED)
        assert Client(client.port).ask("/v1/models")[0] == 401
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert SECRET.encode() not in arguments


@pytest.mark.parametrize(
    ("words", "token", "message"),
    [
        (
            ("--host", "0.0.0.0"),
            "",
            f"other machines can reach it, so requests must carry a token; put one into {TOKEN} or --token_file",
        ),
        (("--host", "::"), "", "must carry a token"),
        (("--host", "no-such-host.invalid"), "", "name an address of this machine"),
        (("--host", "192.0.2.1"), SECRET, "name another with --port"),
        ((), "short", f"{TOKEN}: the token must have 16 to 512 visible ASCII characters"),
        (("--token_file", "/nothing"), "", "--token_file /nothing: cannot be read (No such file or directory)"),
        (("--turns", "0"), "", "--turns = '0': input should be greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_are_answered_with_what_is_needed(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], token: str, message: str
) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ConfigError) as caught:
        run_here(("serve", str(run), "--port", "0", *words))
    assert message in str(caught.value)


def test_a_port_in_use_and_a_missing_run_are_errors(run: Path, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="Address already in use; name another with --port"),
    ):
        run_here(("serve", str(run), "--port", str(taken.getsockname()[1])))
    with pytest.raises(CheckpointError):
        run_here(("serve", str(tmp_path / "nothing"), "--port", "0"))


def test_a_token_comes_from_a_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{SECRET}\n")
    with command(run, "--token_file", str(tmp_path / "token")) as (_, client):
        assert Client(client.port).ask("/v1/models")[0] == 401
        assert Client(client.port, SECRET).ask("/v1/models")[0] == 200


def memory_grown_by_200_requests(ask: Callable[[random.Random], object], client: Client, process: subprocess.Popen[str]) -> int:
    """Make 200 requests from 8 threads twice. Return by how many bytes the server's memory grew in the second round."""
    resident = []
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: ask(random.Random(number)), range(200)))
        client.wait_until_idle()
        resident.append(resident_bytes(process.pid))
    return resident[1] - resident[0]


def test_memory_is_flat_over_200_requests_of_8_threads_some_of_which_leave(run: Path) -> None:
    with command(run, "--max_tokens", "100000") as (process, client):

        def ask(draw: random.Random) -> None:
            kind = draw.randrange(4)
            asked = ASKED | {
                "prompt": "the cat " * draw.randint(1, 15),
                "max_tokens": draw.randint(1, 40),
                "seed": draw.randrange(9),
            }
            if kind == 0:  # leaves in a stream
                client.started(**asked | {"max_tokens": 100_000}).close()
            elif kind == 1:  # leaves while it waits
                connection = http.client.HTTPConnection("127.0.0.1", client.port)
                body = json.dumps(asked | {"max_tokens": 100_000})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                connection.close()
            elif kind == 2:
                assert client.events("/v1/completions", asked)
            else:
                assert client.text(**asked)

        expected = client.text(**ASKED)
        assert memory_grown_by_200_requests(ask, client, process) < LEAKED_BYTES
        assert client.text(**ASKED) == expected
        process.terminate()
        assert process.communicate(timeout=60) == ("", ""), "a client that leaves is no event for the log"


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_the_client_of_openai_makes_200_requests_of_8_threads_some_of_which_it_cancels(chat_run: Path) -> None:
    openai = import_module("openai")
    with command(chat_run, "--max_tokens", "100000", "--turns", "3", SERVE_TOKEN=SECRET) as (process, plain):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{plain.port}/v1", api_key=SECRET)
        [model] = client.models.list().data
        assert client.models.retrieve("talks").id == model.id == "talks"
        messages = [{"role": "user", "content": "Say 3"}]
        kept: dict[int, set[str]] = {}

        def ask(draw: random.Random) -> None:
            seed, kind = draw.randrange(5), draw.randrange(4)
            asked = {"model": "talks", "max_tokens": 12, "seed": seed, "temperature": 1.5}
            if kind == 0:
                answer = client.chat.completions.create(messages=messages, **asked)
                kept.setdefault(seed, set()).add(answer.choices[0].message.content)
                assert answer.usage.completion_tokens <= 12
            elif kind == 1:
                chunks = list(client.chat.completions.create(messages=messages, stream=True, **asked))
                kept.setdefault(seed, set()).add("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
                assert chunks[-1].choices[0].finish_reason in ("length", "stop")
            elif kind == 2:
                with client.completions.create(prompt="Say", stream=True, **asked | {"max_tokens": 100_000}) as stream:
                    next(iter(stream))
            else:
                assert len(client.completions.create(prompt=["Say", "a"], n=2, **asked).choices) == 4

        assert memory_grown_by_200_requests(ask, plain, process) < LEAKED_BYTES
        assert {seed: len(texts) for seed, texts in kept.items()} == dict.fromkeys(range(5), 1)
        with pytest.raises(openai.BadRequestError, match="top_p = 2"):
            client.completions.create(model="talks", prompt="a", top_p=2)
        with pytest.raises(openai.NotFoundError, match="this server has 'talks' alone"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=client.base_url, api_key="wrong").models.list()

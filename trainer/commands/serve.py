from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.errors import ConfigError
from common.files import UnusableFileError, read_input
from common.settings.model import Place
from trainer.commands.run_options import CheckpointOptions

TOKEN = "SERVE_TOKEN"
_TOKEN_FORM = re.compile(r"[!-~]{16,512}")


class ServeOptions(CheckpointOptions):
    """Answers programs that speak OpenAI's API, and shows a page to try the model, at http://127.0.0.1:8000/."""

    host: Annotated[str, Place(metavar="ADDRESS")] = Field(
        "127.0.0.1",
        min_length=1,
        description=f"Address to listen on. One that other machines reach needs a token: {TOKEN} or --token_file.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0 takes a free one.")
    token_file: Annotated[Path | None, Place(metavar="FILE")] = Field(
        None,
        description=f"File with the token that requests must carry (16 characters or more). Without it, {TOKEN} holds the token.",
    )
    name: str | None = Field(
        None, min_length=1, description="Name of the model for clients. Without it, the name of the run's directory."
    )
    max_tokens: int = Field(1024, ge=1, description="Most tokens of one text.")
    timeout_s: float = Field(300, gt=0, description="Longest time for one request in seconds, with its wait.")
    turns: int = Field(4, ge=1, le=256, description="Texts that are written by turns, a token each. Each needs a cache in memory.")
    waiting: int = Field(64, ge=0, le=65536, description="Texts that may wait for a turn. More are refused with status 429.")


def run(options: ServeOptions) -> None:
    import asyncio

    from trainer.commands.saved_model import opened_text_model
    from trainer.inference.conversation import opened_chat
    from trainer.interop.generation import advised_sampling
    from trainer.runs.saved_run import SavedRun
    from trainer.serve.server import Limits, ServedModel, Service, serve

    token = _token(options)
    listening = _opened(options, token)
    with (
        listening,
        opened_text_model(options.run, options.checkpoint, trust_code=options.trust_code) as model,
        opened_chat(model, options.run / "tokenizer", None) as chat,
    ):
        name = options.name or SavedRun(options.run).path.resolve().name
        created = int((options.run / "config.toml").stat().st_mtime)
        served = ServedModel(name, model, chat, advised_sampling(options.run), created)
        limits = Limits(options.max_tokens, options.timeout_s, options.turns, options.waiting)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"

        async def answer() -> None:
            service = Service(served, limits, token)
            await serve(service, listening, lambda: print(f"{name} is served at {address} until Ctrl-C", flush=True))

        asyncio.run(answer())


def _token(options: ServeOptions) -> str | None:
    place, token = TOKEN, os.environ.get(TOKEN) or None
    if options.token_file is not None:
        place = f"--token_file {options.token_file}"
        try:
            token = read_input(options.token_file, 4096).decode().strip()
        except (OSError, UnusableFileError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{place}: cannot be read ({reason}); name a text file with the token") from None
    if token is not None and not _TOKEN_FORM.fullmatch(token):
        raise ConfigError(
            f"{place}: the token must have 16 to 512 visible ASCII characters without spaces; make one with `openssl rand -hex 32`"
        )
    return token


def _opened(options: ServeOptions, token: str | None) -> socket.socket:
    """Return a socket that listens. It is opened before the model, so that a wrong address is an error at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except OSError as error:
        raise ConfigError(f"--host {options.host}: {error.strerror}; name an address of this machine, such as 127.0.0.1") from None
    if token is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"--host {options.host}: other machines can reach it, so requests must carry a token; put one into {TOKEN} or "
            "--token_file, or use 127.0.0.1"
        )
    try:
        return socket.create_server((str(address[0]), options.port), family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # `strerror` also repeats the address
        raise ConfigError(f"port {options.port} of {options.host} cannot be opened: {reason}; name another with --port") from None

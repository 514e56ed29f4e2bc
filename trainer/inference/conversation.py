"""`generate --interactive`: reads lines and writes the continuation of each, until the input ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from common.errors import ConfigError
from common.files import UnusableFileError, parse_json, read_input
from common.untrusted import MAX_PROMPTS_BYTES
from data_pipeline.tokenizer import Tokenizer
from trainer.inference.sampling import Sampling
from trainer.inference.sampling_options import SamplingOptions

__all__ = ["HELP", "converse", "read_prompts", "stop_token_ids"]

Writer = Callable[[str, Sampling], Generator[str, None, None]]
"""Yields the continuation of a prompt, piece by piece."""


_SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "a whole number"),
    "temperature": (float, "a number"),
    "top_k": (lambda word: None if word == "none" else int(word), "a whole number or none"),
    "top_p": (float, "a number"),
    "min_p": (float, "a number"),
    "repetition_penalty": (float, "a number"),
    "stop": (lambda word: (word,) if word else (), "a text"),
    "seed": (int, "a whole number"),
}
"""How to parse the value of each setting that a line can change, and what the value must be."""

HELP = "\n".join(
    [
        "Each line is a prompt; //text is the prompt /text. Ctrl-C ends a continuation, Ctrl-D the program.",
        *(f"  /{name + ' X':<22}{SamplingOptions.model_fields[name].description}" for name in _SETTINGS),
        f"  {'/settings':<23}Show the values of all settings.",
        f"  {'/help':<23}Show this help.",
    ]
)


_CHAT_HELP = HELP.replace(
    "Each line is a prompt; //text is the prompt /text.", "Each line is a message; //text is the message /text."
)
_CHAT_HELP = _CHAT_HELP.replace("ends a continuation", "ends an answer") + f"\n  {'/new':<23}Begin a new conversation."


def converse(
    write_text: Writer,
    sampling: Sampling,
    read: Callable[[str], str],
    out: IO[str],
    *,
    forget: Callable[[], None] | None = None,
) -> None:
    """Read lines until the input ends. A line that begins with `/` changes a setting; any other line is a prompt.

    Args:
        write_text: continues a prompt, or answers in a conversation.
        sampling: settings at the start.
        read: shows its argument and returns the next line, in which lone surrogates stand for bytes that are no UTF-8; raises
            EOFError at the end of the input.
        out: stream that receives all output except the text that `read` shows.
        forget: begins a new conversation. None: each line is a prompt, which is shown before its continuation.
    """
    while True:
        try:
            line = _as_utf8(read("> "))
        except EOFError:
            out.write("\n")
            return
        except KeyboardInterrupt:
            out.write("\n")
            continue
        except UnicodeError:
            out.write("the line is not UTF-8 text\n")
            continue
        if line.strip() == "/new" and forget is not None:
            forget()
            out.write("a new conversation\n")
        elif line.startswith("/") and not line.startswith("//"):
            sampling = _obey(line, sampling, out, HELP if forget is None else _CHAT_HELP)
        elif line:
            prompt = line.removeprefix("/") if line.startswith("//") else line
            _continue(prompt, write_text, sampling, out, shown=prompt if forget is None else "")


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: its lines that are not empty, or the texts of the key `prompt` in a `.jsonl` file."""
    try:
        content = read_input(path, MAX_PROMPTS_BYTES).decode("utf-8-sig")
        # `splitlines` would also cut at other characters, which a prompt may contain.
        lines = content.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except (OSError, UnusableFileError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--prompts {path}: cannot be read ({reason}); name a UTF-8 text file with a prompt on each line"
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_prompt_of(path, number, line) if path.suffix == ".jsonl" else line for number, line in numbered]
    if not prompts:
        raise ConfigError(f"--prompts {path}: the file has no prompt; write one on each line")
    return prompts


def stop_token_ids(tokenizer: Tokenizer, names: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of tokens. A name is an id in decimal digits or the name of a special token."""
    return tuple(_token_id(tokenizer, name) for name in names)


def _token_id(tokenizer: Tokenizer, name: str) -> int:
    number = int(name) if name.isdecimal() else tokenizer.token_id(name)
    if number is None or number >= tokenizer.vocab_size:
        raise ConfigError(
            f"--stop_token {name}: the run's tokenizer has no such token; give a number below {tokenizer.vocab_size}, "
            "the name of a special token, or a text with --stop"
        )
    return number


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        prompt: str = parse_json(line.encode())["prompt"]
        prompt.encode()  # raises for a lone surrogate, which JSON can contain as an escape
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f'{path}, line {number}: no text under "prompt"; write for example {{"prompt": "Once"}}') from None
    return prompt


def _as_utf8(line: str) -> str:
    return line.encode(errors="surrogateescape").decode()


def _obey(line: str, sampling: Sampling, out: IO[str], text_of_help: str) -> Sampling:
    name, _, word = line[1:].partition(" ")
    if name == "settings":
        out.write("".join(f"{each} {getattr(sampling, each)}\n" for each in _SETTINGS))
    elif name not in _SETTINGS:
        out.write(f"{text_of_help}\n" if name == "help" else f"/{name} is not a command; /help lists the commands\n")
    else:
        parse, needed = _SETTINGS[name]
        try:
            sampling = replace(sampling, **{name: parse(word if name == "stop" else word.strip())})
        except ValueError:
            out.write(f"/{name} {word}: {needed} is needed\n")
        except ConfigError as error:
            out.write(f"{error}\n")
        else:
            out.write(f"{name} {getattr(sampling, name)}\n")
    return sampling


def _continue(prompt: str, write_text: Writer, sampling: Sampling, out: IO[str], *, shown: str) -> None:
    pieces = write_text(prompt, sampling)
    out.write(shown)
    out.flush()
    try:
        with closing(pieces):
            for piece in pieces:
                out.write(piece)
                out.flush()
    except KeyboardInterrupt:
        pass
    except ConfigError as error:
        out.write(f"{error}")
    out.write("\n")

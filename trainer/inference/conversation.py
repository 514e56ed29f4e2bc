"""`generate --interactive`: reads lines and writes the continuation of each, or holds a conversation with a chat template.

Also the prompts, stop tokens and ends of turns that other commands take from a user.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from common.errors import ConfigError
from common.files import UnusableFileError, parse_json, read_input
from common.untrusted import MAX_PROMPTS_BYTES
from data_pipeline.conversations.chat_template import ChatTemplate, saved_template
from data_pipeline.conversations.messages import Message, MessagesError
from data_pipeline.conversations.rendering import ChatRenderer, encode_pieces
from data_pipeline.tokenizer import Tokenizer
from trainer.inference.sampling import Sampling
from trainer.inference.sampling_options import SamplingOptions
from trainer.inference.text_model import TextModel

Writer = Callable[[str, Sampling], Generator[str, None, None]]  # yields the continuation of a prompt, piece by piece


_SETTINGS = tuple(SamplingOptions.model_fields)
HELP = "\n".join(
    [
        "Each line is a prompt; //text is the prompt /text. Ctrl-C ends a continuation, Ctrl-D the program.",
        *(f"  /{name + ' X':<22}{SamplingOptions.model_fields[name].description}" for name in _SETTINGS),
        f"  {'/settings':<23}Show the values of all settings.",
        f"  {'/help':<23}Show this help.",
    ]
)
_CHAT_HELP = (
    HELP.replace("prompt", "message", 2).replace("a continuation", "an answer") + f"\n  {'/new':<23}Begin a new conversation."
)


def converse(
    write_text: Writer,
    sampling: Sampling,
    read: Callable[[str], str],
    out: IO[str],
    *,
    forget: Callable[[], None] | None = None,
) -> None:
    """Read lines until the input ends. A line that begins with `/` changes a setting; any other line is a prompt.

    `read` shows its argument and returns the next line, in which lone surrogates stand for bytes that are no UTF-8. `forget` begins
    a new conversation. None: each line is a prompt, which is shown before its continuation.
    """
    while True:
        try:
            line = read("> ").encode(errors="surrogateescape").decode()
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
    place = f"--prompts {path}"
    advice = 'name a UTF-8 text file with a prompt on each line, or a .jsonl file with lines like {"prompt": "Once"}'
    prompts = [text for _, text in read_texts(path, place, "prompt", advice)]
    if not prompts:
        raise ConfigError(f"{place}: the file has no prompt; write one on each line")
    return prompts


def read_texts(path: Path, place: str, field: str, advice: str, *, by_line: bool = True) -> Iterator[tuple[int | None, str]]:
    """Yield the texts of a file with their line: of a .jsonl file the `field` of each object, of another file lines or the whole.

    `place` and `advice` begin and end the error of a file that cannot be read.
    """
    try:
        content = read_input(path, MAX_PROMPTS_BYTES).decode("utf-8-sig")
    except (OSError, UnusableFileError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{place}: cannot be read ({reason}); {advice}") from None
    is_json = path.suffix == ".jsonl"
    if not is_json and not by_line:
        yield None, content
        return
    # `splitlines` would also cut at other characters, which a text may contain.
    for number, line in enumerate(content.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = parse_json(line.encode())[field] if is_json else line
            text.encode()  # raises for another type, and for a lone surrogate, which JSON can contain as an escape
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f'{path}, line {number}: no text under "{field}"; {advice}') from None
        yield number, text


def stop_token_ids(tokenizer: Tokenizer, names: Sequence[str]) -> tuple[int, ...]:
    ids = []
    for name in names:
        number = int(name) if name.isdecimal() else tokenizer.token_id(name)
        if number is None or number >= tokenizer.vocab_size:
            raise ConfigError(
                f"--stop_token {name}: the run's tokenizer has no such token; give a number below {tokenizer.vocab_size}, "
                "the name of a special token, or a text with --stop"
            )
        ids.append(number)
    return tuple(ids)


def _obey(line: str, sampling: Sampling, out: IO[str], text_of_help: str) -> Sampling:
    name, _, word = line[1:].partition(" ")
    if name == "settings":
        out.write("".join(f"{each} {getattr(sampling, each)}\n" for each in _SETTINGS))
    elif name not in _SETTINGS:
        out.write(f"{text_of_help}\n" if name == "help" else f"/{name} is not a command; /help lists the commands\n")
    else:
        stops = (word,) if word else ()
        value = stops if name == "stop" else None if (name, word.strip()) == ("top_k", "none") else word.strip()
        try:
            sampling = sampling.changed(**{name: value})
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


@dataclass
class Chat:
    model: TextModel
    renderer: ChatRenderer
    system: str | None
    end: str  # text that ends an answer
    end_id: int | None  # its id if it is a special token
    history: list[Message] = field(default_factory=list)

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the answer to a message of the user in pieces. What was written before an interruption stays in the history."""
        question = {"role": "user", "content": text}
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            tokens, sampling = self.asked([*system, *self.history, question], sampling)
        except MessagesError as error:
            raise ConfigError(f"the chat template refuses the conversation: {error}; begin a new one with /new") from None
        self.history.append(question)
        written: list[str] = []
        try:
            for piece in self.model.stream_after(tokens, sampling):
                written.append(piece)
                yield piece
        finally:
            self.history.append({"role": "assistant", "content": "".join(written)})

    def asked(self, messages: Sequence[Message], sampling: Sampling) -> tuple[list[int], Sampling]:
        """Return the tokens before an answer, and a sampling that ends with it. MessagesError: the template refuses them."""
        tokens = encode_pieces(self.model.tokenizer, self.renderer.prompt(messages).pieces()) or [self.model.tokenizer.pad_id]
        if self.end_id is None:
            return tokens, sampling.changed(stop=(*sampling.stop, self.end))
        return tokens, sampling.changed(stop_tokens=(*sampling.stop_tokens, self.end_id))

    def forget(self) -> None:
        self.history.clear()


@contextmanager
def opened_chat(model: TextModel, tokenizer_folder: Path, system: str | None) -> Iterator[Chat | None]:
    """Yield a new conversation with a model; None if the data of its run has no chat template."""
    template = saved_template(tokenizer_folder, model.tokenizer)
    if template is None:
        if system is not None:
            raise ConfigError("--system needs data with a chat template, but the data of this run has none; leave it out")
        yield None
        return
    with ChatRenderer(template) as renderer:
        yield Chat(model, renderer, system, *_end_of_turn(renderer, model.tokenizer))


def end_of_turn_id(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that ends an answer; None if ordinary text ends it."""
    with ChatRenderer(template) as renderer:
        return _end_of_turn(renderer, tokenizer)[1]


def _end_of_turn(renderer: ChatRenderer, tokenizer: Tokenizer) -> tuple[str, int | None]:
    end, is_token = renderer.end_of_turn()
    return end, next(token.id for token in tokenizer.named_tokens if token.name == end) if is_token else None

"""Conversations with a model that was trained on a chat template: roles, history, and the end of a turn."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from data_pipeline.conversations.chat_template import ChatTemplate, saved_template
from data_pipeline.conversations.messages import Message, MessagesError
from data_pipeline.conversations.rendering import ChatRenderer, encode_pieces
from data_pipeline.tokenizer import Tokenizer
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel


@dataclass
class Chat:
    model: TextModel
    renderer: ChatRenderer
    system: str | None
    end: str  # text that ends an answer
    is_token: bool  # whether `end` is a special token
    history: list[Message] = field(default_factory=list)

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the answer to a message of the user in pieces. What was written before an interruption stays in the history."""
        question = {"role": "user", "content": text}
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            rendered = self.renderer.prompt([*system, *self.history, question])
        except MessagesError as error:
            raise ConfigError(f"the chat template refuses the conversation: {error}; begin a new one with /new") from None
        tokens = encode_pieces(self.model.tokenizer, rendered.pieces()) or [self.model.tokenizer.pad_id]
        self.history.append(question)
        written: list[str] = []
        try:
            for piece in self.model.stream_after(tokens, self._ending(sampling)):
                written.append(piece)
                yield piece
        finally:
            self.history.append({"role": "assistant", "content": "".join(written)})

    def forget(self) -> None:
        self.history.clear()

    def _ending(self, sampling: Sampling) -> Sampling:
        if not self.is_token:
            return sampling.changed(stop=(*sampling.stop, self.end))
        return sampling.changed(stop_tokens=(*sampling.stop_tokens, _id_of(self.end, self.model.tokenizer)))


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
        end, is_token = renderer.end_of_turn()
        yield Chat(model, renderer, system, end, is_token)


def end_of_turn_id(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that ends an answer; None if ordinary text ends it."""
    with ChatRenderer(template) as renderer:
        end, is_token = renderer.end_of_turn()
    return _id_of(end, tokenizer) if is_token else None


def _id_of(name: str, tokenizer: Tokenizer) -> int:
    return next(token.id for token in tokenizer.named_tokens if token.name == name)

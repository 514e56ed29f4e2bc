"""Options of `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from common.settings.model import Place
from trainer.commands.options.saved_run import CheckpointOptions
from trainer.inference.sampling_options import SamplingOptions

__all__ = ["GenerateOptions"]


class GenerateOptions(SamplingOptions, CheckpointOptions):
    """Writes texts that continue prompts."""

    prompt: Annotated[tuple[str, ...], Place(metavar="TEXT")] = Field(
        (), description="Texts to continue. Without any, one text is written without a prompt."
    )
    prompts: Annotated[Path | None, Place(metavar="FILE")] = Field(
        None, description='File with a prompt on each line, or a .jsonl file with {"prompt": TEXT} on each line.'
    )
    stop_token: Annotated[tuple[str, ...], Place(metavar="TOKEN")] = Field(
        (), description="Tokens that end a continuation: ids, or names of special tokens."
    )
    batch: int = Field(16, ge=1, description="Number of prompts that are continued together.")
    no_cache: bool = Field(False, description="Compute all tokens again in each step, for comparison. This is slower.")
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print a JSON object for each prompt.")
    score: bool = Field(False, description="Score the texts by fluency, repetition, diversity and coherence.")
    reference: Annotated[Path | None, Place(metavar="RUN")] = Field(
        None, description="Run whose latest model computes the perplexity of --score. Without it, the model that generates."
    )
    raw: bool = Field(False, description="Write control characters of the text to the terminal unchanged.")
    interactive: bool = Field(
        False,
        description="Read prompts from the terminal, or hold a conversation if the data of the run has a chat template. "
        "/help shows its commands.",
    )
    system: Annotated[str | None, Place(metavar="TEXT")] = Field(
        None, description="System message of a conversation (--interactive, with a chat template)."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.interactive and (self.prompt or self.prompts or self.as_json or self.score):
            raise ValueError("--interactive reads prompts from the terminal; leave out --prompt, --prompts, --json and --score")
        if self.system is not None and not self.interactive:
            raise ValueError("--system is the system message of a conversation; add --interactive, or leave out --system")
        if self.reference is not None and not self.score:
            raise ValueError(
                "--reference names the run that computes the perplexity of --score; add --score, or leave out --reference"
            )
        if self.system is not None and not _is_utf8(self.system):
            raise ValueError("--system is not UTF-8 text")
        if not all(map(_is_utf8, self.prompt)):
            raise ValueError("--prompt is not UTF-8 text; write it into a file and use --prompts")
        return self


def _is_utf8(word: str) -> bool:
    """Return False for a word with other bytes, for which Python uses lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True

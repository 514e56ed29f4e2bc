from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from common.errors import ConfigError
from common.files import plain
from common.settings.markers import AlsoCalled
from common.settings.model import Place
from trainer.commands.run_options import CheckpointOptions
from trainer.inference.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from trainer.inference.sampling import Sampling
    from trainer.inference.text_model import Continuation, TextModel


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
    batch: Annotated[int, AlsoCalled("batch_size")] = Field(16, ge=1, description="Number of prompts that are continued together.")
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
        for option, texts in (("--system", (self.system or "",)), ("--prompt", self.prompt)):
            if any("\ud800" <= character <= "\udfff" for text in texts for character in text):  # Python's form of other bytes
                remedy = "; write it into a file and use --prompts" if option == "--prompt" else ""
                raise ValueError(f"{option} is not UTF-8 text{remedy}")
        return self


def run(options: GenerateOptions) -> None:
    from trainer.inference.conversation import converse, opened_chat

    out = getattr(sys.stdout, "behind", sys.stdout) if options.raw else sys.stdout
    if not options.interactive:
        for piece in written_texts(options):
            print(piece, end="", flush=True, file=out)
        return
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("--interactive reads prompts from standard input, which is closed; open it, or use --prompt or --prompts")
    with suppress(ImportError):
        import_module("readline")  # with it, `input` can edit lines and recall earlier lines with the arrow keys
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 does not end the program
    with _opened(options) as source, opened_chat(source, options.run / "tokenizer", options.system) as chat:
        if chat is None:
            converse(source.stream, _sampling(options, source), input, out)
        else:
            converse(chat.answer, _sampling(options, source), input, out, forget=chat.forget)


def written_texts(options: GenerateOptions) -> Iterator[str]:
    """Yield the output in pieces. A single text comes while the model writes it; several come when they are finished."""
    from trainer.commands.saved_model import opened_text_model
    from trainer.inference.conversation import read_prompts

    prompts = [*options.prompt, *(read_prompts(options.prompts) if options.prompts else ())] or [""]
    written: list[Continuation] = []
    with _opened(options) as source:
        sampling = _sampling(options, source)
        if len(prompts) == 1 and not options.as_json and not options.score:
            yield prompts[0]
            yield from source.stream(prompts[0], sampling)
            yield "\n"
            return
        for first in range(0, len(prompts), options.batch):
            for one in source.complete(prompts[first : first + options.batch], sampling, first_row=first):
                written.append(one)
                head = f"=== {len(written)} of {len(prompts)} ({one.finish_reason})"
                yield _line(one.to_json()) if options.as_json else f"{head}\n{one.prompt}{one.text}\n"
        if options.score and options.reference is None:
            yield _scores(options, source, options.run, written)
    if options.score and options.reference is not None:
        with opened_text_model(options.reference, "latest", trust_code=options.trust_code) as reference:
            yield _scores(options, reference, options.reference, written)


def _opened(options: GenerateOptions) -> AbstractContextManager[TextModel]:
    from trainer.commands.saved_model import opened_text_model

    return opened_text_model(options.run, options.checkpoint, use_cache=not options.no_cache, trust_code=options.trust_code)


def _sampling(options: GenerateOptions, source: TextModel) -> Sampling:
    from trainer.inference.conversation import stop_token_ids
    from trainer.inference.sampling import Sampling
    from trainer.interop.generation import advised_sampling

    given = options.model_dump(include=set(SamplingOptions.model_fields) & options.model_fields_set)
    return Sampling(
        **advised_sampling(options.run).model_dump() | given, stop_tokens=stop_token_ids(source.tokenizer, options.stop_token)
    )


def _scores(options: GenerateOptions, reference: TextModel, run: Path, written: Sequence[Continuation]) -> str:
    from trainer.inference.samples import score_texts, text_perplexity
    from trainer.runs.saved_run import SavedRun

    scores = score_texts([one.text for one in written], text_perplexity(reference, SavedRun(run).config, written))
    if options.as_json:
        return _line({"scores": plain(scores)})
    lines = [f"{name:<18}{'-' if value is None else f'{value:.4g}'}\n" for name, value in scores.items()]
    return "".join(["=== scores\n", *lines])


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"

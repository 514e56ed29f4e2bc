"""`generate`: what a run's model writes after some prompts, as lines for people or JSON objects, and the scores of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from common.files import plain
from trainer.commands.options.generate import GenerateOptions
from trainer.commands.saved_model import opened_text_model
from trainer.inference.conversation import converse, read_prompts, stop_token_ids
from trainer.inference.samples import perplexity
from trainer.inference.sampling import Sampling
from trainer.inference.sampling_options import SamplingOptions
from trainer.inference.text_model import Continuation, TextModel
from trainer.inference.text_scores import score_texts
from trainer.run.directory import load_config

__all__ = ["WritingRequest", "converse_with_run", "run", "written_texts"]


@dataclass(frozen=True)
class WritingRequest:
    """What is to be written."""

    run: Path
    checkpoint: str
    """latest, best, or a step."""
    sampling: Sampling
    stop_tokens: Sequence[str] = ()
    """Ids, or names of special tokens, that end a text."""
    prompts: Sequence[str] = ("",)
    batch: int = 16
    """Prompts that are continued together."""
    use_cache: bool = True
    as_json: bool = False
    score: bool = False
    reference: Path | None = None
    """Run whose latest model gives the perplexity; none: the same model."""
    trust_code: bool = False
    """Code that came with these runs may be executed; see `trainer.extensions.trust`."""


def run(options: GenerateOptions) -> None:
    """Writes the texts to standard output, or converses on the terminal.

    Raises:
        ConfigError: a file of prompts cannot be read; or see `written_texts`.
        CheckpointError: see `written_texts`.
    """
    request = _request_of(options)
    out = getattr(sys.stdout, "behind", sys.stdout) if options.raw else sys.stdout
    if not options.interactive:
        for piece in written_texts(request):
            print(piece, end="", flush=True, file=out)
        return
    with suppress(ImportError):
        import_module("readline")  # it lets `input` edit lines and recall earlier ones with the arrow keys
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # one line that cannot be read does not end the conversation
    converse_with_run(request, input, out)


def _request_of(options: GenerateOptions) -> WritingRequest:
    return WritingRequest(
        run=options.run,
        checkpoint=options.checkpoint,
        sampling=Sampling(**options.model_dump(include=set(SamplingOptions.model_fields))),
        stop_tokens=options.stop_token,
        prompts=[*options.prompt, *(read_prompts(options.prompts) if options.prompts else ())] or [""],
        batch=options.batch,
        use_cache=not options.no_cache,
        as_json=options.as_json,
        score=options.score,
        reference=options.reference,
        trust_code=options.trust_code,
    )


def written_texts(request: WritingRequest) -> Iterator[str]:
    """Yields what is to be printed, piece by piece: a single text as it is written, several as they are finished.

    Raises:
        CheckpointError: the run or the checkpoint is not there, or it is damaged.
        ConfigError: a stop token is none of the tokenizer's.
    """
    written: list[Continuation] = []
    with _opened(request) as source:
        sampling = _with_stop_tokens(request, source)
        if len(request.prompts) == 1 and not request.as_json and not request.score:
            yield request.prompts[0]
            yield from source.stream(request.prompts[0], sampling)
            yield "\n"
            return
        for first in range(0, len(request.prompts), request.batch):
            for one in source.complete(request.prompts[first : first + request.batch], sampling, first_row=first):
                written.append(one)
                yield _line(one.to_json()) if request.as_json else _shown(one, len(written), len(request.prompts))
        if request.score and request.reference is None:
            yield _scores(request, source, request.run, written)
    if request.score and request.reference is not None:
        with opened_text_model(request.reference, "latest", trust_code=request.trust_code) as reference:
            yield _scores(request, reference, request.reference, written)


def converse_with_run(request: WritingRequest, read: Callable[[str], str], out: IO[str]) -> None:
    """Continues the lines that `read` returns; see `trainer.inference.conversation.converse`."""
    with _opened(request) as source:
        converse(source.stream, _with_stop_tokens(request, source), read, out)


def _opened(request: WritingRequest) -> AbstractContextManager[TextModel]:
    return opened_text_model(request.run, request.checkpoint, use_cache=request.use_cache, trust_code=request.trust_code)


def _with_stop_tokens(request: WritingRequest, source: TextModel) -> Sampling:
    return replace(request.sampling, stop_tokens=stop_token_ids(source.tokenizer, request.stop_tokens))


def _shown(one: Continuation, number: int, total: int) -> str:
    return f"=== {number} of {total} ({one.finish_reason})\n{one.prompt}{one.text}\n"


def _scores(request: WritingRequest, reference: TextModel, run: Path, written: Sequence[Continuation]) -> str:
    scores = score_texts([one.text for one in written], perplexity(reference, load_config(run), written)).to_json()
    if request.as_json:
        return _line({"scores": plain(scores)})
    lines = [f"{name:<18}{'-' if value is None else f'{value:.4g}'}\n" for name, value in scores.items()]
    return "".join(["=== scores\n", *lines])


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"

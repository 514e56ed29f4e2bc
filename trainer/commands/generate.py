"""`generate`: continues prompts with the model of a run, prints the texts, and scores them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import plain
from trainer.commands.options.generate import GenerateOptions
from trainer.commands.saved_model import opened_text_model
from trainer.inference.chat import opened_chat
from trainer.inference.conversation import converse, read_prompts, stop_token_ids
from trainer.inference.samples import text_perplexity
from trainer.inference.sampling import Sampling
from trainer.inference.sampling_options import SamplingOptions
from trainer.inference.text_model import Continuation, TextModel
from trainer.inference.text_scores import score_texts
from trainer.runs.directory import load_config

__all__ = ["run", "written_texts"]


def run(options: GenerateOptions) -> None:
    """Write the texts to standard output, or read prompts from the terminal.

    Raises:
        ConfigError: see `written_texts`.
        CheckpointError: see `written_texts`.
    """
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
    """Yield the output in pieces. A single text comes while the model writes it; several texts come when they are finished.

    Raises:
        CheckpointError: the run or the checkpoint does not exist or is damaged.
        ConfigError: the file of prompts cannot be read, or the tokenizer has no such stop token.
    """
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
                yield _line(one.to_json()) if options.as_json else _shown(one, len(written), len(prompts))
        if options.score and options.reference is None:
            yield _scores(options, source, options.run, written)
    if options.score and options.reference is not None:
        with opened_text_model(options.reference, "latest", trust_code=options.trust_code) as reference:
            yield _scores(options, reference, options.reference, written)


def _opened(options: GenerateOptions) -> AbstractContextManager[TextModel]:
    return opened_text_model(options.run, options.checkpoint, use_cache=not options.no_cache, trust_code=options.trust_code)


def _sampling(options: GenerateOptions, source: TextModel) -> Sampling:
    values = options.model_dump(include=set(SamplingOptions.model_fields))
    return Sampling(**values, stop_tokens=stop_token_ids(source.tokenizer, options.stop_token))


def _shown(one: Continuation, number: int, total: int) -> str:
    return f"=== {number} of {total} ({one.finish_reason})\n{one.prompt}{one.text}\n"


def _scores(options: GenerateOptions, reference: TextModel, run: Path, written: Sequence[Continuation]) -> str:
    scores = score_texts([one.text for one in written], text_perplexity(reference, load_config(run), written)).to_json()
    if options.as_json:
        return _line({"scores": plain(scores)})
    lines = [f"{name:<18}{'-' if value is None else f'{value:.4g}'}\n" for name, value in scores.items()]
    return "".join(["=== scores\n", *lines])


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"

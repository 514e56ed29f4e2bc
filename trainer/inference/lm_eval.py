"""Standard benchmarks with lm-evaluation-harness, an optional dependency that only this module imports.

The harness turns its tasks into requests: to compute the likelihood of texts, or to continue them. `HarnessModel` answers them with
the model of a run, without an export. Data sets come from the hub of Hugging Face or its cache, or from local files of a task.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.text import columns
from trainer.config import TrainConfig
from trainer.inference.likelihood import ScoredWindow, cut_windows, num_common, score_windows
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel

_INSTALLED = importlib.util.find_spec("lm_eval") is not None
_HarnessLM: Any = importlib.import_module("lm_eval.api.model").LM if _INSTALLED else object  # optional: requirements-eval.lock
_MAX_TOKENS = 256  # longest continuation in tokens if a task sets none; the default of the harness


class HarnessModel(_HarnessLM):  # type: ignore[misc]
    def __init__(self, text_model: TextModel, config: TrainConfig) -> None:
        super().__init__()
        self._text_model = text_model
        self._config = config
        self._batch_size = config.eval.micro_batch_size or config.batch.micro_rows

    @property
    def tokenizer_name(self) -> str:
        return self._text_model.tokenizer.digest

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) `log p` of the continuation in nats, and whether each token is the likeliest.

        A context that is too long is cut off from the left. Spaces at the end of the context count as part of the continuation,
        because pieces begin with spaces. A piece that contains the end of the context and the start of the continuation does too.
        """
        windows = []
        for context, continuation in (request.args for request in requests):
            start, whole = self._text_model.tokenizer.encode_batch([context.rstrip(), context + continuation])
            given = num_common(whole, start)
            windows.append(cut_windows([*self._first, *whole[:given]], whole[given:], self._text_model.context))
        return self._scored(windows)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self._text_model.tokenizer.encode(request.args[0]) for request in requests]
        windows = [cut_windows(self._first, tokens, self._text_model.context) for tokens in texts]
        return [log_p for log_p, _ in self._scored(windows)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        answers: dict[int, str] = {}
        settings = [_sampling(request.args[1]) for request in requests]
        for sampling in dict.fromkeys(settings):
            numbers = [number for number, wanted in enumerate(settings) if wanted == sampling]
            numbers.sort(key=lambda number: -len(requests[number].args[0]))
            for start in range(0, len(numbers), self._batch_size):
                some = numbers[start : start + self._batch_size]
                continuations = self._text_model.complete([requests[number].args[0] for number in some], sampling, first_row=start)
                answers |= {number: one.text for number, one in zip(some, continuations, strict=True)}
        return [answers[number] for number in range(len(requests))]

    @property
    def _first(self) -> list[int]:
        """The first token of a text: bos, as in training, or if there is none, eos or padding."""
        tokenizer = self._text_model.tokenizer
        known = (number for number in (tokenizer.bos_id, tokenizer.eos_id) if number is not None)
        return [next(known, tokenizer.pad_id)]

    def _scored(self, windows: Sequence[Sequence[ScoredWindow]]) -> list[tuple[float, bool]]:
        flat = [window for some in windows for window in some]
        model = self._text_model
        scored = iter(score_windows(model.model, flat, model.tokenizer.vocab_size, self._config, self._batch_size))
        results = []
        for some in windows:
            likelihoods = [next(scored) for _ in some]
            log_p = -math.fsum(likelihood.nats for likelihood in likelihoods)
            results.append((log_p, all(likelihood.is_greedy for likelihood in likelihoods)))
        return results


def run_benchmarks(text_model: TextModel, config: TrainConfig, tasks: str, limit: int | None) -> dict[str, dict[str, Any]]:
    """Return the harness's results of each task, by name. `tasks` has names, separated by commas, or a folder of task files."""
    if not _INSTALLED:
        raise ConfigError(
            "--lm-eval needs lm-evaluation-harness, which is not installed; install it with "
            "`pip install --no-deps --require-hashes -r env/requirements-eval.lock`, or `pip install lm-eval`"
        )
    evaluator, manager = (importlib.import_module(f"lm_eval.{name}") for name in ("evaluator", "tasks"))
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    folder = Path(tasks)
    if folder.is_dir():
        known = manager.TaskManager(include_path=str(folder), include_defaults=False)
        names = known.all_subtasks
        if not names:
            raise ConfigError(f"--lm-eval {tasks}: no task in this folder; a task is a .yaml file with the key `task`")
    else:
        known = manager.TaskManager()
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known.all_tasks]:
            raise ConfigError(
                f"--lm-eval: the harness has no task {', '.join(unknown)}, and there is no such folder; "
                "`python -m lm_eval ls tasks` lists its tasks"
            )
    model = HarnessModel(text_model, config)
    found = evaluator.simple_evaluate(model, tasks=names, task_manager=known, limit=limit, log_samples=False, bootstrap_iters=0)
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def describe_benchmarks(results: Mapping[str, Mapping[str, Any]], step: int) -> str:
    cells = [("task", "metric", "value")]
    for task, values in results.items():
        for name, value in values.items():
            metric = name.removesuffix(",none")  # the harness adds the filter of the answers to the name of a metric
            if isinstance(value, int | float) and "," in name and not metric.endswith("_stderr"):
                cells.append((task, metric, f"{value:.4f}"))
    return f"step {step}\n{columns(cells, left=(0, 1))}"


def _sampling(wanted: Mapping[str, Any]) -> Sampling:
    until = wanted.get("until") or ()
    return Sampling(
        max_tokens=int(wanted.get("max_gen_toks", _MAX_TOKENS)),
        temperature=float(wanted.get("temperature", 1.0)) if wanted.get("do_sample") else 0.0,
        top_p=float(wanted.get("top_p", 1.0)),
        stop=(until,) if isinstance(until, str) else tuple(text for text in until if text),
    )

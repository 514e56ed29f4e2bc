from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from common.errors import ConfigError, PreparedDataError
from common.settings.model import Place
from trainer.commands.run_options import CheckpointOptions

if TYPE_CHECKING:
    from data_pipeline.dataset.manifest import Manifest
    from data_pipeline.tokenizer import Tokenizer


class EvaluateOptions(CheckpointOptions):
    """Measures how well a checkpoint predicts the validation text of its run, or of other data."""

    data: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Prepared data to evaluate on. Without it, the data of the run is used."
    )
    by: Literal["source", "kind", "length", "all"] | None = Field(
        None, description="Also show the loss of each group of the text: by source, by kind, or by length of documents."
    )
    lm_eval: Annotated[str | None, Place("--lm-eval", metavar="TASKS")] = Field(
        None, description="Tasks of lm-evaluation-harness to run instead: names separated by commas, or a folder with tasks."
    )
    limit: Annotated[int | None, Place(metavar="N")] = Field(
        None,
        ge=1,
        description="Number of validation rows, or of examples of each task. Without it, the number of rows of the run, or all "
        "examples.",
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")

    @property
    def groups(self) -> tuple[str, ...]:
        return ("source", "kind", "length") if self.by == "all" else () if self.by is None else (self.by,)

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if self.lm_eval is not None and (self.data is not None or self.by is not None):
            raise ValueError("--lm-eval brings its own texts; leave out --data and --by, or run evaluate a second time with them")
        return self


def run(options: EvaluateOptions) -> None:
    if options.lm_eval is not None:
        print(benchmark_run(options, options.lm_eval))
        return
    text = evaluate_run(options)
    if os.environ.get("RANK", "0") == "0":
        print(text)


def evaluate_run(options: EvaluateOptions, *, as_language: bool = False) -> str:
    """Return the evaluation as text or JSON. `as_language`: of the decoder, whatever the objective of its training was."""
    import numpy as np

    from data_pipeline.dataset.locks import reading
    from data_pipeline.dataset.manifest import read_manifest
    from data_pipeline.tokenizer import load_tokenizer
    from trainer.commands.saved_model import opened_model
    from trainer.context import RunContext
    from trainer.evaluation.evaluate import evaluate
    from trainer.evaluation.tally import Grouping, describe_evaluation
    from trainer.extensions.hooks import Extension
    from trainer.finetuning.task import saved_task
    from trainer.machine.determinism import settings_here
    from trainer.model.attention import backend_of
    from trainer.model.memory_estimate import most_rows
    from trainer.runs.saved_run import SavedRun
    from trainer.training.trainable import hold_reference, new_loss

    run, limit, saved = options.run, options.limit, SavedRun(options.run)
    config = settings_here(saved.config)
    if as_language:
        config = config.model_copy(update={"objective": "language"})
    directory = saved.data_folder(options.data)
    with reading(directory, f"evaluate of run {run.absolute().name}"):
        manifest, tokenizer = read_manifest(directory), load_tokenizer(run / "tokenizer")
        objective = saved_task(saved, config)
        rows = objective.rows(directory, manifest, "val", verify=config.verify_data)
        _check_fit(run, directory, manifest, tokenizer, len(rows), config.model.context if config.encoder is None else None)
        settings = config.eval if limit is None else config.eval.model_copy(update={"max_rows": limit})
        micro = min(settings.micro_batch_size or config.batch.micro_rows, most_rows(config.model, manifest.row_length))
        settings = settings.model_copy(update={"micro_batch_size": micro})
        with opened_model(saved, config, options.checkpoint, trust_code=options.trust_code) as (model, group, step):
            is_own = manifest.root_digest == saved.record.data.root_digest
            lost = saved.record.adjustments.quarantined(step) if is_own else frozenset()
            backend = backend_of(config, group.device, trains=False)
            context = RunContext(config.model_copy(update={"eval": settings}), manifest, group, backend)
            grouping = Grouping.of(directory, manifest, tokenizer if objective.predicts_tokens else None)
            loss = new_loss(model, Extension(), objective, config.loss)
            if objective.reference is not None:
                hold_reference(context, objective, saved.record.initial)
            result = evaluate(loss, context, rows.without(lost), grouping=grouping, measures=objective.measures)
    left_out = rows.num_rows_in(lost, np.arange(len(rows)))
    measured = None if result.measured is None else result.measured(step)
    if options.as_json:
        total = {"val_loss" if name == "loss" else name: value for name, value in result.total.to_json().items()}
        by_group = {f"by_{one}": {group: score.to_json() for group, score in result.groups[one].items()} for one in options.groups}
        facts = {"step": step, **total, "rows": result.num_rows, "left_out": left_out, **by_group}
        if measured is not None:
            facts[measured.name] = {name: value for name, value in measured.to_json().items() if name not in ("event", "step")}
        return json.dumps(facts, ensure_ascii=False)
    note = f"\n\nleft out, as in the run: {left_out:,} of {len(rows):,} rows, from shards in quarantine" if left_out else ""
    lines = "" if measured is None or objective.measures is None else f"\n\n{objective.measures.lines(measured)}"
    return describe_evaluation(result, step, options.groups) + lines + note


def _check_fit(run: Path, data: Path, manifest: Manifest, tokenizer: Tokenizer, num_rows: int, context: int | None) -> None:
    if manifest.tokenizer_digest != tokenizer.digest:
        raise ConfigError(
            f"{data}: its tokenizer is {manifest.tokenizer_digest}, but {run} was trained with {tokenizer.digest}; prepare "
            "the text with the tokenizer of the run. To compare models with different tokenizers, prepare the same text with each "
            "tokenizer, and compare bits per byte"
        )
    if context is not None and manifest.row_length > context:
        raise ConfigError(
            f"{data}: its rows have {manifest.row_length} tokens, but the model of {run} accepts {context} (model.context); "
            f"prepare it with --row_length {context}"
        )
    if not num_rows:
        raise PreparedDataError(f"{data}: no validation rows; prepare from more text")


def benchmark_run(options: EvaluateOptions, tasks: str) -> str:
    from data_pipeline.tokenizer import load_tokenizer
    from trainer.commands.saved_model import check_writes, opened_model
    from trainer.inference.lm_eval import describe_benchmarks, run_benchmarks
    from trainer.inference.text_model import TextModel
    from trainer.machine.determinism import settings_here
    from trainer.runs.saved_run import SavedRun

    run, saved = options.run, SavedRun(options.run)
    check_writes(saved)
    config = settings_here(saved.config)
    with opened_model(saved, config, options.checkpoint, trust_code=options.trust_code, alone="--lm-eval") as (model, _, step):
        text_model = TextModel(model, load_tokenizer(run / "tokenizer"), config.model.context)
        results = run_benchmarks(text_model, config, tasks, options.limit)
    if options.as_json:
        return json.dumps({"step": step, "results": results}, ensure_ascii=False)
    return describe_benchmarks(results, step)

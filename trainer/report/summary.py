"""The summary that `train` prints when it has finished: five lines, of which the last is the next command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.command_line import command_text
from common.text import duration, visible
from data_pipeline.conversations.chat_template import TEMPLATE_FILE
from trainer.report.recorded_run import read_run
from trainer.report.write import REPORT
from trainer.runs.events import EvalEvent, MeasuresEvent
from trainer.runs.saved_run import SavedRun


def summary_lines(run: Path) -> list[str]:
    saved, facts = SavedRun(run), read_run(run)
    record, progress, unit = facts.record, saved.state(saved.steps[-1]).progress, facts.target
    # The first evaluation shows the model before training, so it is not a result.
    evaluations = {event.step: event for event in facts.evaluations if event.step > 0}
    measures = {event.step: event for event in facts.of(MeasuresEvent)}
    last, best = evaluations.get(progress.evaluated_step), evaluations.get(progress.best_step or 0)
    report = run / REPORT
    if record.identity.get("objective") == "classification":
        following = command_text("classify", run, "FILE")
    else:
        is_chat = (run / "tokenizer" / TEMPLATE_FILE).exists()
        following = command_text("generate", run, *(["--interactive"] if is_chat else ["--prompt", "The "]))
    lines = {
        "finished" if record.status == "finished" else "stopped": (
            f"{record.step:,} steps in {duration(progress.seconds)} ({record.ended_by})"
        ),
        "validation": "no evaluation" if last is None else f"{_scores(last, unit, measures)} at the last step",
        "best": "no evaluation gave a number" if best is None else f"{_scores(best, unit, measures)} at step {best.step:,}",
        "report": str(report) if report.exists() else f"none yet; to write it: {command_text('report', run)}",
        "next": following,
    }
    return [f"{name:<10}  {visible(text)}" for name, text in lines.items()]


def _scores(evaluation: EvalEvent, unit: str, measures: Mapping[int, MeasuresEvent]) -> str:
    per_byte = "" if evaluation.bits_per_byte is None else f", {evaluation.bits_per_byte:.3f} bits per byte"
    measured = measures.get(evaluation.step)
    return f"{evaluation.val_loss:.4f} nats per {unit}{per_byte}{'' if measured is None else f', {measured.words}'}"

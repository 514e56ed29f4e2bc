from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from common.errors import ConfigError, ProjectError
from data_pipeline.dataset.shards import ShardError
from trainer.context import RunContext
from trainer.data.bad_shards import as_project_error, shared_faults
from trainer.evaluation.evaluate import EvaluationStopped, evaluate
from trainer.evaluation.results import Evaluation
from trainer.evaluation.tally import Grouping
from trainer.health.convergence import is_comparable, judge_convergence, with_convergence
from trainer.inference.samples import prompts_of, sample_and_score
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import Continuation, TextModel
from trainer.inference.text_scores import Scores
from trainer.machine.memory import is_out_of_memory
from trainer.parallel.fsdp import gathered
from trainer.runs.events import SampleEvent, ScoresEvent
from trainer.runs.progress import Progress
from trainer.training.adjuster import Adjuster
from trainer.training.run_end import RunEnd
from trainer.training.run_state import LiveState
from trainer.training.stop import StopRequests
from trainer.training.trainable import RunData, Trainable


@dataclass(frozen=True)
class Evaluator:
    data: RunData
    trainable: Trainable
    state: LiveState
    end: RunEnd
    stop: StopRequests
    adjuster: Adjuster
    grouping: Grouping
    beat: Callable[[], None]  # reports to the watchdog that this rank makes progress

    @property
    def context(self) -> RunContext:
        return self.data.context

    def due(self, progress: Progress) -> bool:
        due = progress.step % self.context.config.eval.every_steps == 0 or self.end.finished(progress)
        return due and progress.evaluated_step != progress.step

    def evaluate(self, progress: Progress) -> Progress:
        """If a stop is requested meanwhile, the result is discarded, and the resumed run evaluates this step."""
        trainable, monitor = self.trainable, self.state.monitor
        can_write = trainable.task.writes
        try:
            with trainable.average.swapped_in() if trainable.average else nullcontext():
                evaluation = self._evaluation(progress.step)
                # Without a finite loss there are no probabilities to sample from.
                samples = self._samples(progress.step) if can_write and math.isfinite(evaluation.loss) else None
                # Rank 0 may need long for its samples. The others wait here and not in the next step.
                self.context.group.smallest(0)
        except EvaluationStopped:
            return progress
        config, extension = self.context.config, trainable.extension
        after = progress.after_evaluation(evaluation.loss, self.state.train_losses.take())
        custom_loss = extension.custom_loss is not None or extension.has_step or not trainable.task.comparable
        comparable = is_comparable(config.loss, custom_loss=custom_loss)
        monitor.write(with_convergence(evaluation.event(progress.step), after.evaluations, config.eval, comparable=comparable))
        if evaluation.measured is not None:
            monitor.write(evaluation.measured(progress.step))
        if samples is not None:
            texts, scores = samples
            events = [SampleEvent(progress.step, one.prompt, one.text) for one in texts]
            monitor.samples(progress.step, events, None if scores is None else ScoresEvent(progress.step, scores.to_json()))
        monitor.convergence(judge_convergence(after.evaluations, config.eval))
        monitor.scalars(extension.evaluated(trainable.view(after), evaluation))
        return after

    def _evaluation(self, step: int) -> Evaluation:
        """Return the validation loss after a step. If rows cannot be read twice, put their shards into quarantine or stop."""
        context = self.context
        tried: set[str] = set()
        while True:
            faults: dict[str, ProjectError] = {}
            evaluation = self._evaluation_without(self.adjuster.adjustments.quarantined(step), faults)
            found = shared_faults(faults, context.manifest, context.group)
            if not found:
                return evaluation
            if found.keys() <= tried:
                adjustment = self.adjuster.quarantine(found, faults, step)
                self.adjuster.make(adjustment)
                self.adjuster.announce(adjustment, step, after=step)
            tried |= found.keys()
            time.sleep(next(iter(context.config.loader.retry_waits_s), 0.0))

    def _evaluation_without(self, blank: frozenset[str], faults: dict[str, ProjectError]) -> Evaluation:
        context = self.context

        def note(error: ShardError | OSError) -> None:
            shard = self.data.val_rows.shard_of(error)
            assert shard is not None
            faults[shard] = as_project_error(error)

        try:
            return evaluate(
                self.trainable.loss,
                context,
                self.data.val_rows.without(blank, note),
                self.beat,
                self.grouping,
                lambda: self.stop.requested,
                self.trainable.task.measures,
            )
        except Exception as error:
            if context.config.parallel != "fsdp" or not is_out_of_memory(error):
                raise
            num_rows = context.config.eval.micro_batch_size or context.config.batch.micro_rows
            raise ConfigError(
                f"the evaluation ran out of memory with {num_rows} rows in a forward pass; "
                "set eval.micro_batch_size to fewer rows, then run the same command again"
            ) from error

    def _samples(self, step: int) -> tuple[list[Continuation], Scores | None] | None:
        config, group = self.context.config, self.context.group
        blank = self.adjuster.adjustments.quarantined(step)
        rows = self.data.val_rows.without(blank, lambda _error: None)  # rows that cannot be read give no prompt
        prompts = group.on_main(lambda: prompts_of(config.eval, rows, self.data.tokenizer))
        if not prompts or not (group.is_main or config.parallel == "fsdp"):
            return None
        seed = (config.seed + step) % (1 << 63)
        sampling = Sampling(max_tokens=config.eval.sample_tokens, temperature=config.eval.sample_temperature, seed=seed)
        source = TextModel(self.trainable.model, self.data.tokenizer, config.model.context)
        return gathered(self.trainable.module, lambda: sample_and_score(source, prompts, sampling, config))

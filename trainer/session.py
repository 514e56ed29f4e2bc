"""Everything that a training run holds: built once before the loop, closed once after it."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from data_pipeline.errors import ConfigError, PreparedDataError
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.shards import Rows
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainConfig
from trainer.determinism import configure_determinism
from trainer.distributed import Group, joined_group
from trainer.evaluate import evaluate
from trainer.generate import Sampling, generate
from trainer.metrics import JsonLinesSink, Monitor, Sink, StepMetrics, TensorBoardSink, TerminalSink
from trainer.model import Decoder, build_model, load_weights, parameters_by_name
from trainer.optim import build_optimizer, optimizer_tensors, restore_optimizer
from trainer.record import check_identity, identity_of, locked_run, open_record
from trainer.signals import StopRequest, stop_request
from trainer.state import Progress
from trainer.step import StepResult, make_scaler, wrap_for_training

__all__ = ["Plan", "Session", "opened_session", "plan_run", "weights_digest"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """When the run ends, from its limits and the size of the data."""

    steps: int | None
    rows: int | None
    targets: int | None
    seconds: float | None
    decay_steps: int
    """Step at which the learning rate has reached its floor."""
    last_step: int | None
    """The step at which the limits on steps and epochs end the run."""

    def finished(self, progress: Progress) -> bool:
        """True once the first limit is reached."""
        return (
            (self.steps is not None and progress.step >= self.steps)
            or (self.rows is not None and progress.rows >= self.rows)
            or (self.targets is not None and progress.targets >= self.targets)
            or (self.seconds is not None and progress.seconds >= self.seconds)
        )


@dataclass
class Session:
    """The parts of a run, as the loop uses them."""

    config: TrainConfig
    group: Group
    plan: Plan
    train_rows: Rows
    val_rows: Rows
    tokenizer: Tokenizer
    model: Decoder
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    checkpoints: CheckpointStore
    monitor: Monitor
    stop: StopRequest
    resumed: Progress

    def evaluate(self, progress: Progress) -> Progress:
        """Measures the validation loss and writes a sample."""
        evaluation = evaluate(self.model, self.val_rows, self.config, self.group, self.beat)
        self.monitor.evaluation(progress.step, evaluation)
        if self.group.is_main and self.config.eval.sample_tokens:
            self.monitor.sample(progress.step, self._sample(progress.step))
        return progress.after_evaluation(evaluation.loss)

    def save(self, progress: Progress) -> Progress:
        """Writes a checkpoint and deletes those that need not be kept; an error on rank 0 is raised on every rank."""
        saved = replace(progress, saved_seconds=progress.seconds)
        self.group.on_main(lambda: self._save_on_main(saved))
        return saved

    def is_saved(self, progress: Progress) -> bool:
        """True where the newest checkpoint is of this step; the same answer on every rank."""
        return self.group.on_main(lambda: self.checkpoints.steps()[-1:] == [progress.step])

    def report(
        self, progress: Progress, result: StepResult, learning_rate: float, tokens_per_s: float, loader_wait_s: float
    ) -> None:
        """Hands the numbers of a step to the sinks, and shows that this rank is alive."""
        self.monitor.train(
            StepMetrics(
                step=progress.step,
                last_step=self.plan.last_step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=learning_rate,
                targets=progress.targets,
                tokens_per_s=tokens_per_s,
                loader_wait_s=loader_wait_s,
            )
        )
        self.beat()

    def beat(self) -> None:
        """Tells the container's health check that this rank is alive."""
        (self.config.run / "heartbeat" / f"rank-{self.group.rank}").touch()

    def _save_on_main(self, progress: Progress) -> None:
        weights = {name: parameter.detach().cpu() for name, parameter in parameters_by_name(self.model).items()}
        moments = {name: tensor.cpu() for name, tensor in optimizer_tensors(self.model, self.optimizer).items()}
        state = {"progress": progress.to_json(), "scaler": self.scaler.state_dict()}
        self.checkpoints.save(Checkpoint(progress.step, weights, moments, state))
        newest = self.checkpoints.steps()[-self.config.checkpoint.keep_last :]
        self.checkpoints.retain([*newest, *([progress.best_step] if progress.best_step is not None else [])])

    def _sample(self, step: int) -> str:
        settings = self.config.eval
        sampling = Sampling(
            max_tokens=settings.sample_tokens, temperature=settings.sample_temperature, seed=self.config.seed + step
        )
        return settings.prompt + "".join(generate(self.model, self.tokenizer, settings.prompt, sampling))


@contextmanager
def opened_session(config: TrainConfig) -> Iterator[Session]:
    """Checks the settings against data and machine, builds all parts, and restores the newest checkpoint if there is one.

    Raises:
        ConfigError: the settings do not fit the data, the machine or the run that is there.
        PreparedDataError: the data is damaged or missing.
        CheckpointError: checkpoints are there, and none is intact.
    """
    configure_determinism(config)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_request())
        group = stack.enter_context(joined_group(config.device))
        logging.basicConfig(level=logging.INFO if group.is_main else logging.WARNING, format="%(message)s")
        manifest = read_manifest(config.data)
        train_rows = Rows(config.data, manifest, "train", verify=config.verify_data)
        val_rows = Rows(config.data, manifest, "val", verify=config.verify_data)
        _check_fit(config, manifest, len(train_rows), len(val_rows), group)
        plan = plan_run(config, manifest, len(train_rows))
        identity = identity_of(config, manifest, plan.decay_steps, group)
        checkpoints = CheckpointStore(config.run / "checkpoints")

        def prepare_run() -> int | None:
            stack.enter_context(locked_run(config.run))
            newest = checkpoints.newest_verified()
            if newest is not None:
                check_identity(config.run, identity, config.resume.allow_changes)
            (config.run / "heartbeat").mkdir(exist_ok=True)
            open_record(config.run, config, manifest, identity)
            return newest

        newest = group.on_main(prepare_run)
        model = build_model(config.model, manifest.vocab_size, config.seed).to(group.device)
        module = wrap_for_training(model, config, group, manifest.row_length)
        optimizer = build_optimizer(model, config.optim)
        scaler = make_scaler(config, group.device)
        resumed = Progress() if newest is None else _restore(checkpoints.load(newest), model, optimizer, scaler)
        monitor = Monitor(_sinks(config, plan, newest) if group.is_main else ())
        stack.callback(monitor.close)
        session = Session(
            config=config,
            group=group,
            plan=plan,
            train_rows=train_rows,
            val_rows=val_rows,
            tokenizer=load_tokenizer(config.data / "tokenizer"),
            model=model,
            module=module,
            optimizer=optimizer,
            scaler=scaler,
            checkpoints=checkpoints,
            monitor=monitor,
            stop=stop,
            resumed=resumed,
        )
        _log.info("%s", _describe(session, manifest, continued=newest is not None))
        yield session


def _describe(session: Session, manifest: Manifest, *, continued: bool) -> str:
    config, group = session.config, session.group
    num_weights = sum(parameter.numel() for parameter in parameters_by_name(session.model).values())
    return (
        f"{f'resuming {config.run} at step {session.resumed.step}' if continued else f'training in {config.run}'}  "
        f"{num_weights / 1e6:.2f}M weights, vocabulary {manifest.vocab_size}, {len(session.train_rows)} training and "
        f"{len(session.val_rows)} validation rows of {manifest.row_length} tokens, "
        f"{group.world_size} rank{'s' * (group.world_size > 1)} on {group.device.type}, {config.precision}"
    )


def plan_run(config: TrainConfig, manifest: Manifest, num_rows: int) -> Plan:
    """The end of the run in every unit, and the length of the learning-rate schedule.

    A limit in tokens becomes steps through the mean number of targets in a row, for the schedule only; the run itself ends
    by its count.
    """
    limits, batch_rows = config.limits, config.batch.global_rows
    epoch_rows = None if limits.epochs is None else math.ceil(limits.epochs * num_rows)
    row_targets = sum(shard.targets for shard in manifest.shards if shard.split == "train") / num_rows
    counted = [limits.steps, None if epoch_rows is None else math.ceil(epoch_rows / batch_rows)]
    certain = [steps for steps in counted if steps is not None]
    estimated = [] if limits.tokens is None else [max(1, math.ceil(limits.tokens / row_targets / batch_rows))]
    decay_steps = config.schedule.decay_steps or min(certain + estimated)
    if config.schedule.kind != "constant" and config.schedule.warmup_steps >= decay_steps:
        raise ConfigError(
            f"schedule.warmup_steps = {config.schedule.warmup_steps}, but the learning rate is to reach its "
            f"floor at step {decay_steps}; warm up for fewer steps, train longer, or set schedule.decay_steps"
        )
    return Plan(
        steps=limits.steps,
        rows=epoch_rows,
        targets=limits.tokens,
        seconds=None if limits.minutes is None else limits.minutes * 60,
        decay_steps=decay_steps,
        last_step=min(certain) if certain and limits.tokens is None else None,
    )


def weights_digest(model: nn.Module) -> str:
    """sha256 over all weights in the order of their names, as fp32 in little-endian order."""
    digest = hashlib.sha256()
    for parameter in parameters_by_name(model).values():
        digest.update(parameter.detach().cpu().float().numpy().astype("<f4", copy=False).tobytes())
    return f"sha256:{digest.hexdigest()}"


def _check_fit(config: TrainConfig, manifest: Manifest, train_rows: int, val_rows: int, group: Group) -> None:
    if manifest.row_length > config.model.context:
        raise ConfigError(
            f"the rows in {config.data} have {manifest.row_length} tokens, but "
            f"model.context = {config.model.context}; raise model.context, or prepare with --row_length {config.model.context}"
        )
    for split, num_rows in (("train", train_rows), ("val", val_rows)):
        if num_rows == 0:
            raise PreparedDataError(f"{config.data}: no {split} rows; prepare from more text")
    if config.batch.micro_batches < group.world_size:
        raise ConfigError(
            f"batch.global_rows = {config.batch.global_rows} and batch.micro = {config.batch.micro} make "
            f"{config.batch.micro_batches} micro-batches, too few for {group.world_size} ranks; use "
            f"batch.micro = {max(1, config.batch.global_rows // group.world_size)} or less, or more rows"
        )


def _restore(checkpoint: Checkpoint, model: Decoder, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> Progress:
    load_weights(model, checkpoint.model)
    restore_optimizer(model, optimizer, checkpoint.optimizer)
    scaler.load_state_dict(checkpoint.state["scaler"])
    return Progress(**checkpoint.state["progress"])


def _sinks(config: TrainConfig, plan: Plan, resume_step: int | None) -> list[Sink]:
    run = config.run
    return [
        JsonLinesSink(run / "metrics.jsonl", resume_step),
        TensorBoardSink(run / "tensorboard", resume_step, config.log.every_steps),
        TerminalSink(resume_step or 0, plan.last_step, config.log.every_steps),
    ]

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.files import parse_json, read_input
from common.redaction import redacted_settings
from trainer.config import TrainConfig
from trainer.distributed.group import Group
from trainer.machine.gpus import KernelLog, opened_gpus
from trainer.machine.sampler import HardwareSampler, Host
from trainer.metrics.monitor import Monitor, RunningNumbers
from trainer.metrics.sinks.base import Sink
from trainer.metrics.sinks.json_lines import JsonLinesSink, NodeHardwareSink
from trainer.metrics.sinks.mlflow_sink import MlflowSink
from trainer.metrics.sinks.tensorboard import TensorBoardSink
from trainer.metrics.sinks.terminal import TerminalSink
from trainer.metrics.sinks.wandb_sink import WandbSink
from trainer.metrics.step_metrics import RunFacts
from trainer.runs.layout import METRICS
from trainer.runs.metrics_file import CutOff, events_until
from trainer.watchdog.processes import LAUNCHER_VARIABLE

_MAX_REPORT_BYTES = 64 << 20


@contextmanager
def opened_monitor(config: TrainConfig, group: Group, *, last_step: int | None, cut_off: CutOff | None) -> Iterator[Monitor]:
    """Rank 0 has all sinks; the first rank of each further machine has one for its hardware. `cut_off` is None for a new run."""
    with ExitStack() as stack:
        running, sinks = RunningNumbers(config.log.average_steps), list[Sink]()

        def open_on_main() -> None:
            for sink in _sinks(config, last_step, cut_off):
                stack.callback(sink.close)
                sink.begin(facts)
                sinks.append(sink)
            if cut_off is not None:
                running.restore(events_until(config.run / METRICS, cut_off))

        facts = RunFacts(config.run.name, redacted_settings(config.model_dump(mode="json")), _report(config.data))
        group.on_main(open_on_main)  # an error there is raised on every rank
        if group.local_rank:
            yield Monitor()
            return
        if not group.is_main:
            sinks.append(NodeHardwareSink(config.run / f"hardware-rank-{group.rank}.jsonl", cut_off))
            stack.callback(sinks[0].close)
        readings = stack.enter_context(_readings(config, group))
        yield Monitor(sinks, running, config.alerts, readings, history=partial(events_until, config.run / METRICS))


def _sinks(config: TrainConfig, last_step: int | None, cut_off: CutOff | None) -> Iterator[Sink]:
    run, settings = config.run, config.log
    yield JsonLinesSink(run / METRICS, cut_off)
    yield TensorBoardSink(run / "tensorboard", cut_off, settings.every_steps)
    yield TerminalSink(0 if cut_off is None else cut_off.step, last_step, settings.every_steps)
    if settings.wandb_project is not None:
        yield WandbSink(run, settings.wandb_project, settings.every_steps)
    if settings.mlflow_uri is not None:
        yield MlflowSink(run, settings.mlflow_uri, settings.mlflow_experiment, settings.every_steps)


@contextmanager
def _readings(config: TrainConfig, group: Group) -> Iterator[Any]:
    if not config.log.hardware_every_s:
        yield lambda: ()
        return
    launcher = int(os.environ.get(LAUNCHER_VARIABLE) or os.getpid())
    visible = range(torch.cuda.device_count() if group.device.type == "cuda" else 0)
    gpus = opened_gpus([str(torch.cuda.get_device_properties(number).uuid) for number in visible])
    sampler = HardwareSampler(gpus, Host(config.run, launcher), config.log.hardware_every_s, KernelLog())
    with sampler.running():
        yield sampler.take


def _report(data: Path) -> Mapping[str, Any]:
    try:
        report = parse_json(read_input(data / "report.json", _MAX_REPORT_BYTES, below=data))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from data_pipeline.dataset.shards import RowBatch
from trainer.data.batch import GlobalBatch, micro_batch
from trainer.machine.profiler import StepProfiler
from trainer.training.training_run import TrainingRun
from trainer.watchdog.heartbeat import Heartbeat, HeartbeatWriter, Timeouts


def batch_of(num_rows: int, num_pieces: int) -> GlobalBatch:
    """One micro-batch whose rows have this many pieces."""
    segments = np.minimum(np.arange(64, dtype=np.int32), num_pieces - 1)
    rows = RowBatch(np.zeros((num_rows, 64), np.uint16), np.stack([segments] * num_rows))
    return GlobalBatch(0, np.arange(num_rows), 1, 1.0, (micro_batch(rows, with_bounds=True),), 1)


def test_a_step_may_be_slow_if_its_batch_has_a_shape_that_no_batch_had_before(tmp_path: Path) -> None:
    heartbeat = HeartbeatWriter(tmp_path / "rank-0", Timeouts(None, 600))
    timer, profiler = SimpleNamespace(waited_for_data=lambda _seconds: None), StepProfiler(tmp_path, None, 0, torch.device("cpu"))
    run = cast(Any, SimpleNamespace(heartbeat=heartbeat, own_timer=timer, profiler=profiler))
    sizes = [(4, 1)] * 5 + [(4, 60)] * 5 + [(2, 1)] * 5 + [(4, 1), (4, 60)]  # more pieces, fewer rows, then known shapes
    limits = []
    for step, size in enumerate(sizes, start=1):
        TrainingRun.next_batch(run, iter([batch_of(*size)]), step)
        beat = Heartbeat.from_bytes((tmp_path / "rank-0").read_bytes())
        assert beat is not None
        assert beat.phase == "forward"
        limits.append(beat.limit_s)
    heartbeat.close()
    assert limits == [600, 600, 600, 30, 30] * 3 + [30, 30]

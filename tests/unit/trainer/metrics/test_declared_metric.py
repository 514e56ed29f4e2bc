"""A new metric of a step needs one declaration: a field of `TrainEvent`. This is tried on a copy of the program."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
DECLARATION = """
    joules: Annotated[
        Number,
        Metric(
            "power/joules",
            digits=2,
            chart="Hardware: energy of a step",
            terminal="  {value:.1f} joules",
            plot=Plot("Energy of a step", "joules"),
        ),
    ] = None
"""
PROGRAM = """
import sys
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.run_example import write_run
from tests.support.step_metrics import step_metrics
from trainer.metrics.sinks.json_lines import JsonLinesSink
from trainer.metrics.sinks.tensorboard import TensorBoardSink
from trainer.metrics.sinks.terminal import TerminalSink
from trainer.metrics.sinks.tensorboard import layout
from trainer.report.write import write_report

run = write_run(Path("run"), [])
files = [JsonLinesSink(run / "metrics.jsonl", None), TensorBoardSink(run / "tensorboard", None, 1)]
sinks = [*files, TerminalSink(0, 2, 1, sys.stdout)]
for sink in sinks:
    for number in (1, 2):
        sink.write(step_metrics(number, joules=12.345 * number))
    sink.close()
print((run / "metrics.jsonl").read_text())
curves = EventAccumulator(str(run / "tensorboard"))
curves.Reload()
print("curve", [event.step for event in curves.Scalars("power/joules")], layout()["Hardware"]["energy of a step"])
write_report(run)
print("chart", "energy of a step: 12.35 at step 1, 24.69 at step 2" in (run / "report.html").read_text())
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    copy = tmp_path_factory.mktemp("copy")
    for name in ("common", "data_pipeline", "trainer", "tests/support"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    events = copy / "trainer" / "runs" / "events.py"
    text = events.read_text()
    place = text.index("    measures: Annotated[Numbers")
    events.write_text(f"{text[:place]}{DECLARATION.lstrip(chr(10))}{text[place:]}")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "wanted",
    [
        '"joules": 12.35}',
        "curve [1, 2] ['Multiline', ['power/joules$']]",
        "loader wait 1.0 ms  12.3 joules  0.0 s so far",
        "chart True",
    ],
    ids=["metrics.jsonl", "TensorBoard", "terminal", "report"],
)
def test_a_declared_metric_of_a_step_is_shown_everywhere(shown: str, wanted: str) -> None:
    assert wanted in shown

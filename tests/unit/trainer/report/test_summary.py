import re
from pathlib import Path

import pytest

from tests.support.prepared import write_prepared
from tests.support.runs import metrics, tiny_config
from trainer.commands.train import run as run_train
from trainer.loop import train
from trainer.report.summary import summary_lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last evaluation is not its best."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_config(
        write_prepared(folder / "data"), folder / "a run", optim={"lr": 1.0}, schedule={"kind": "constant"}, limits={"steps": 8}
    )
    train(config)
    return config.run


def test_the_summary_has_five_lines_with_the_results_of_the_last_and_the_best_step(finished: Path) -> None:
    results = {event["step"]: event for event in metrics(finished, "eval") if event["step"] > 0}
    best = min(results.values(), key=lambda event: event["val_loss"])
    assert best["step"] < 8, "the example must tell the best step from the last"
    end, last, at_best, report, following = summary_lines(finished)
    assert re.fullmatch(r"finished    8 steps in \d+\.\d s \(limits.steps\)", end)
    assert last == f"validation  {_scores(results[8])} at the last step"
    assert at_best == f"best        {_scores(best)} at step {best['step']}"
    assert report == f"report      none yet; to write it: trainer report '{finished}'"
    assert following == f"next        trainer generate '{finished}' --prompt 'The '"


def test_a_run_on_conversations_is_continued_by_talking_to_it(finished: Path) -> None:
    template = finished / "tokenizer" / "chat_template.jinja"
    template.touch()
    assert summary_lines(finished)[-1] == f"next        trainer generate '{finished}' --interactive"
    template.unlink()


def test_the_summary_names_a_report_that_exists(finished: Path) -> None:
    page = finished / "report.html"
    page.touch()
    assert f"report      {page}" in summary_lines(finished)
    page.unlink()


def test_train_prints_the_summary_on_stderr_and_the_digest_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(write_prepared(tmp_path / "data"), tmp_path / "run", limits={"steps": 4})
    run_train(config)
    shown = capsys.readouterr()
    assert re.fullmatch(r"weights sha256:[0-9a-f]{64} steps 4\n", shown.out)
    assert shown.err.splitlines()[-5:] == summary_lines(config.run)


def _scores(event: dict[str, float]) -> str:
    return f"{event['val_loss']:.4f} nats per token, {event['bits_per_byte']:.3f} bits per byte"

"""The page about a run: what is there is shown, what is missing is left out, hostile text stays text, its size is bounded."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from common.html.chart import Curve
from common.settings.load import load_settings
from common.settings.options import help_parser
from tests.support.html_pages import Page
from tests.support.run_example import HOSTILE, example_events, train_event, write_run
from trainer.config import TrainConfig
from trainer.report.charts import hardware_charts, layer_charts
from trainer.report.recorded_run import read_run
from trainer.report.run_page import introduction, render_report
from trainer.report.write import report_at_end, write_report

HEADINGS = (
    *("Curves", "Alerts", "Evaluation", "Samples", "Throughput", "Hardware", "Checkpoints", "Settings", "Record"),
    "Verify and replay",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "example", example_events())


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return render_report(read_run(run))


def test_the_page_shows_everything_that_the_run_recorded(page: str) -> None:
    shown = Page(page)
    assert re.findall(r"<h2>(.*?)</h2>", page) == list(HEADINGS)
    for words in (
        "step 60 of 60",
        "60,000",
        "30 s",  # 60 steps of 1,000 tokens at 2,000 a second
        "median; MFU 25.0 %",
        "loss is nan; plain words",
        "an alert of an older version",
        "60 (best)",
        "By source, at step 60",
        "By kind of text, at step 60",
        "By length of the document, at step 60",
        "bits per byte",
        "gap to training",
        "trend per 1,000 steps",
        "plain words go on 2",
        "distinct 2",
        "10.0 % of it waiting for data",
        "6 saves delayed it by 1.5 s in total, 0.2 s at most",
        "NVIDIA H100",
        "GPU 1: memory total mib",
        "sha256:" + "77" * 32,
        "limits.steps",
    ):
        assert words in shown.text, words
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page)
    assert {"Loss", "Perplexity", "Learning rate", "Gradient norm", "Throughput", "Loader wait", "Bits per byte"} <= set(titles)
    assert {"Gap of the validation loss", "Trend of the validation loss"} <= set(titles)
    assert {"Validation loss by source", "Update-to-weight ratio of the layers", "GPU: temperature", "Host: rss"} <= set(titles)


def test_a_run_of_an_earlier_version_has_a_page_without_gap_and_trend(tmp_path: Path) -> None:
    new = ("train_loss", "gap", "trend_per_1000_steps")
    events = [{name: value for name, value in event.items() if name not in new} for event in example_events()]
    page = render_report(read_run(write_run(tmp_path / "old", events)))
    assert "validation loss" in Page(page).text
    for words in ("gap to training", "trend per 1,000", "Gap of the validation loss", "Trend of the validation loss"):
        assert words not in page


def test_the_page_needs_no_network_and_allows_itself_none(page: str) -> None:
    shown = Page(page)
    assert not {"img", "link", "iframe", "object", "embed", "base", "form"} & set(shown.tags)
    assert not [name for name, _ in shown.attributes if name.startswith("on") or name in ("src", "srcset", "action", "style")]
    assert all(value and value.startswith("#") for name, value in shown.attributes if name == "href")
    assert not re.search(r"url\(|@import|https?:(?!//www.w3.org/2000/svg)", page)
    [policy] = [value for _, value in shown.attributes if value and value.startswith("default-src")]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_the_page_shows_no_markup_of_markdown(page: str) -> None:
    assert "`" not in re.sub("<(pre|code|script|style)\\b.*?</", "", page, flags=re.DOTALL)


def test_links_within_the_page_lead_somewhere(page: str) -> None:
    attributes = Page(page).attributes
    targets = {value for name, value in attributes if name == "id"}
    assert {value[1:] for name, value in attributes if name == "href" and value} == targets


def test_hostile_text_stays_text_wherever_it_stands(tmp_path: Path, page: str) -> None:
    events = json.loads(json.dumps(example_events(words=HOSTILE)))
    run = write_run(
        tmp_path / "</script><script>alert(1)</script>",
        events,
        settings={"eval": {"prompt": HOSTILE.replace("\ud800", "")}, "mixture": {"weights": {"<b>x</b>": 1}}},
        identity={HOSTILE.replace("\ud800", ""): "<script>alert('x')</script>", "device": "<b>"},
        environment={"code": "<img src=x onerror=alert(1)>", "packages": {"<i>": "\u202e"}},
    )
    hostile = render_report(read_run(run))
    assert set(Page(hostile).tags) <= set(Page(page).tags), "no element comes out of the text"
    assert Page(hostile).tags.count("script") == 1
    assert "alert('x')" in Page(hostile).text, "and the text is there to read"
    assert not [character for character in hostile if ord(character) < 32 and character not in "\n\t"]
    assert "\u202e" not in hostile
    assert "⟨U+202E⟩" in hostile
    assert hostile.encode()


@pytest.mark.parametrize(
    "events", [None, [], [{"event": "eval", "step": 0, "val_loss": "nan", "val_loss_hex": "nan", "perplexity": "nan"}]]
)
def test_a_run_without_a_step_has_a_page_that_says_so(tmp_path: Path, events: list[Any] | None) -> None:
    run = write_run(tmp_path / "run", events, status="training")
    shown = Page(render_report(read_run(run)))
    assert "no end recorded" in shown.text
    assert "step 0 of 60" in shown.text
    assert "Samples" not in shown.text
    page_path, picture = write_report(run)
    assert page_path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_losses_that_are_no_numbers_are_said_and_marked(tmp_path: Path) -> None:
    events = [train_event(1, 2.0), train_event(2, math.nan, grad_norm="inf"), train_event(3, math.inf, grad_norm="nan")]
    shown = render_report(read_run(write_run(tmp_path / "run", events)))
    assert "mean of 3 steps; last inf" in shown
    assert shown.count("not finite at step 2") == 2, "in loss and gradient norm; means are of finite losses"


@pytest.mark.parametrize(
    ("device", "gpus", "shown"),
    [
        ("cpu, AVX512", ["NVIDIA H100"], "a processor"),
        ("cpu, AVX512", [], "a processor"),
        ("NVIDIA H100", ["NVIDIA H100"] * 2, "NVIDIA H100"),
    ],
)
def test_the_introduction_names_what_the_run_was_trained_on(device: str, gpus: list[str], shown: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], identity={"device": device}, environment={"gpus": gpus, "processor": "a processor"})
    assert introduction(read_run(run)).endswith(f"rank on {shown}.")


def test_every_gpu_of_a_machine_with_eight_has_its_line() -> None:
    each = {f"GPU {index}": Curve.of([(1, 60 + index), (2, 70)]) for index in range(8)}
    [chart] = hardware_charts({("gpu", "temperature_c"): each})
    assert [line.name for line in chart.lines] == list(each)


def test_layers_whose_ratio_is_infinite_are_no_reason_to_compute_with_infinity(tmp_path: Path) -> None:
    ratios = {"a": "inf", "b": "inf", "c": 0.5, "d": 0.25}
    run = write_run(tmp_path / "run", [train_event(1, 2.0), {"event": "layers", "step": 1, "update_ratio": ratios}])
    [chart] = [chart for chart in layer_charts(read_run(run)) if chart.title.startswith("Update")]
    assert {line.name: line.curve.y_N.tolist() for line in chart.lines} == {
        "highest": [math.inf],
        "median": [math.inf],
        "lowest": [0.25],
    }


def test_the_time_of_a_run_is_that_of_its_steps_as_they_were_measured(tmp_path: Path) -> None:
    events = [train_event(1, 2.0, seconds=2.5, tokens_per_s=0.1), train_event(2, 2.0, seconds=0.123456)]
    assert read_run(write_run(tmp_path / "run", events)).seconds == pytest.approx(2.623456)


def test_a_step_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_event(1, 2.0), train_event(2, 1.0)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    assert read_run(run).step == 2


def test_the_page_of_a_very_long_run_is_small_and_holds_its_one_spike(tmp_path: Path) -> None:
    """A line of `metrics.jsonl` for each of 6,000 steps; beyond the number of columns nothing grows with the steps."""
    events = [train_event(step, 900.0 if step == 3777 else 2.0) for step in range(1, 6_001)]
    shown = render_report(read_run(write_run(tmp_path / "run", events)))
    assert len(shown) < 350_000
    assert "highest 900" in shown


def test_very_many_evaluations_alerts_and_samples_are_cut_and_say_so(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for step in range(1, 501):
        loss = 1.0 if step == 123 else 2.0
        events += [
            train_event(step, 2.0),
            {
                "event": "eval",
                "step": step,
                "val_loss": loss,
                "val_loss_hex": loss.hex(),
                "perplexity": math.exp(loss),
                "targets": 9,
            },
            {"event": "sample", "step": step, "text": "word " * 3000},
            {"event": "alert", "step": step, "message": "look"},
        ]
    shown = Page(render_report(read_run(write_run(tmp_path / "run", events)))).text
    assert "123 (best)" in shown
    assert "evaluations between these are in metrics.jsonl" in shown
    assert "and 300 more alerts, in metrics.jsonl" in shown
    assert shown.count(" look ") == 200
    assert len(shown) < 120_000


def test_a_directory_that_is_no_run_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)


def test_settings_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    (run / "config.toml").write_text("[train")
    with pytest.raises(CheckpointError, match=r"config\.toml"):
        read_run(run)
    (run / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.toml: missing"):
        read_run(run)


def test_a_report_at_the_end_never_fails_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report_at_end(tmp_path)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "`trainer report " in record.getMessage()


def test_the_page_and_its_picture_go_where_they_are_told_to(run: Path, tmp_path: Path) -> None:
    found = write_report(run, tmp_path / "page.html")
    assert found == (tmp_path / "page.html", tmp_path / "training_metrics.png")
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "metrics.jsonl", "record.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "training_metrics.png"]


def test_the_command_that_trains_again_is_one_that_the_trainer_understands(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a run", [], settings={"optim": {"lr": 0.002}}, environment={"world_size": 4})
    shown = "\n".join(Page(render_report(read_run(run))).texts)
    [line] = [line for line in shown.splitlines() if "--recipe" in line]
    assert line.startswith("PET_NPROC_PER_NODE=4 entrypoints/train --recipe ")
    words = shlex.split(line)
    config = load_settings(TrainConfig, words[words.index("--recipe") :], help_parser(TrainConfig, "train", ""), {})
    assert (config.optim.lr, config.run, config.data) == (0.002, tmp_path / "a run-again", Path("/data"))

"""`trainer evaluate`: groups, other data, and lm-evaluation-harness if it is installed."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.files import write_atomic
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.tokenizer import CharacterTokenizer, load_tokenizer
from tests.support.grouped import ROW_LENGTH, write_grouped
from tests.support.harness_tasks import write_tasks
from tests.support.runs import metrics, run_command, tiny_config
from trainer.commands.evaluate import EvaluateOptions, benchmark_run, evaluate_run
from trainer.commands.generate import GenerateOptions, written_texts
from trainer.commands.saved_model import load_model
from trainer.inference.lm_eval import HarnessModel
from trainer.inference.text_model import TextModel
from trainer.loop import train
from trainer.model.attention import make_layout
from trainer.runs.saved_run import load_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    data = write_grouped(folder / "data")
    train(tiny_config(data, folder / "run", eval={"sample_tokens": 0}))
    return folder / "run"


def test_the_json_object_has_the_validation_loss_of_the_run_and_every_group(run: Path) -> None:
    result = json.loads(evaluate_run(EvaluateOptions(run=run, by="all", as_json=True)))
    last = metrics(run, "eval")[-1]
    assert (result["step"], result["val_loss"], result["targets"]) == (12, last["val_loss"], last["targets"])
    assert result["bits_per_byte"] == pytest.approx(result["val_loss"] / math.log(2))
    assert list(result["by_source"]) == ["a", "b", "c"]
    assert list(result["by_kind"]) == ["prose", "code"]
    assert list(result["by_length"]) == ["2", "3-4", "5-8", "9-16", "17-32"]
    assert sum(group["targets"] for group in result["by_length"].values()) == result["targets"]
    assert "by_kind" not in json.loads(evaluate_run(EvaluateOptions(run=run, by="source", as_json=True)))


def test_people_get_aligned_tables(run: Path) -> None:
    text = evaluate_run(EvaluateOptions(run=run, by="kind"))
    total, empty, *table = text.splitlines()
    assert total.startswith("step 12  validation loss ")
    assert "bits per byte" in total
    assert not empty
    assert table[0].split() == ["kind", "loss", "perplexity", "bits/byte", "targets", "share"]
    assert [line.split()[0] for line in table[1:]] == ["prose", "code"]
    assert len({len(line) for line in table}) == 1


def test_a_limit_evaluates_some_rows(run: Path) -> None:
    assert json.loads(evaluate_run(EvaluateOptions(run=run, limit=3, as_json=True)))["rows"] == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the precision is supported")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "float8"])
def test_a_run_of_a_gpu_can_be_looked_at_without_one(run: Path, tmp_path: Path, precision: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    settings = (copy / "config.toml").read_text()
    for name, here, there in (("device", "cpu", "cuda"), ("attention", "auto", "varlen"), ("precision", "fp32", precision)):
        assert f'\n{name} = "{here}"\n' in settings
        settings = settings.replace(f'\n{name} = "{here}"\n', f'\n{name} = "{there}"\n')
    (copy / "config.toml").write_text(settings)
    found, expected = (json.loads(evaluate_run(EvaluateOptions(run=path, as_json=True)))["val_loss"] for path in (copy, run))
    assert found == pytest.approx(expected, rel=0.01)
    request = GenerateOptions(run=copy, max_tokens=4, as_json=True, score=True)
    assert [list(json.loads(line)) for line in written_texts(request)] == [
        ["prompt", "text", "tokens", "finish_reason"],
        ["scores"],
    ]


def test_other_data_is_evaluated_where_its_tokenizer_is_the_same(run: Path, tmp_path: Path) -> None:
    other = write_grouped(tmp_path / "other")
    assert evaluate_run(EvaluateOptions(run=run, data=other, as_json=True)) == evaluate_run(EvaluateOptions(run=run, as_json=True))
    manifest = read_manifest(other)
    foreign = replace(manifest, tokenizer_digest=CharacterTokenizer("abc").digest, root_digest="")
    write_atomic(other / MANIFEST, foreign.sealed()[1])
    with pytest.raises(ConfigError, match=r"its tokenizer is sha256:.*was trained with sha256:"):
        evaluate_run(EvaluateOptions(run=run, data=other, as_json=True))
    too_long = replace(manifest, row_length=ROW_LENGTH * 2, root_digest="")
    write_atomic(other / MANIFEST, too_long.sealed()[1])
    with pytest.raises(ConfigError, match=rf"rows have {ROW_LENGTH * 2} tokens.*--row_length {ROW_LENGTH}"):
        evaluate_run(EvaluateOptions(run=run, data=other, as_json=True))


def test_the_command_shows_all_groups_and_refuses_what_does_not_fit(run: Path) -> None:
    shown = run_command("trainer", "evaluate", str(run), "--by", "all")
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines() if "perplexity  bits/byte" in line] == [
        "source",
        "kind",
        "length",
    ]
    for words, message in (
        (("--limit", "0"), "--limit = '0': input should be greater than or equal to 1"),
        (("--lm-eval", "arc_easy", "--by", "kind"), "leave out --data and --by"),
    ):
        refused = run_command("trainer", "evaluate", str(run), *words)
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr


def test_without_the_harness_its_tasks_are_refused_with_the_install_command(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match="pip install"):
        benchmark_run(EvaluateOptions(run=run), "arc_easy")


class Request:
    """A request as the harness passes it."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture(scope="module")
def harness_model(run: Path) -> HarnessModel:
    config = load_config(run)
    model, _ = load_model(run, config, "latest")
    single = config.model_copy(update={"eval": config.eval.model_copy(update={"micro_batch_size": 1})})
    return HarnessModel(TextModel(model, load_tokenizer(run / "tokenizer"), config.model.context), single)


def plain_log_p(model: HarnessModel, ids: list[int], first: int) -> float:
    """Return `log p` of the ids from index `first` on, computed in one pass over all ids but the last."""
    tokens_1L = torch.tensor([ids[:-1]])
    layout = make_layout(torch.zeros_like(tokens_1L), torch.arange(len(ids) - 1)[None])
    with torch.no_grad():
        log_p_LV = model._text_model.model(tokens_1L, layout)[0].log_softmax(dim=1)
    return math.fsum(log_p_LV[place - 1, ids[place]].item() for place in range(first, len(ids)))


def test_likelihoods_of_texts_are_those_of_a_plain_computation(harness_model: HarnessModel) -> None:
    tokenizer = harness_model._text_model.tokenizer
    pairs = [("the cat", " sat"), ("", "on a mat"), ("the dog ", "ran")]
    scored = harness_model.loglikelihood([Request(*pair) for pair in pairs])
    for (context, continuation), (log_p, _) in zip(pairs, scored, strict=True):
        ids = [tokenizer.bos_id, *tokenizer.encode(context + continuation)]
        first = 1 + len(tokenizer.encode(context.rstrip()))
        assert log_p == pytest.approx(plain_log_p(harness_model, ids, first), rel=1e-6)  # type: ignore[arg-type]


def test_a_text_longer_than_the_context_has_the_sum_of_its_windows(harness_model: HarnessModel) -> None:
    tokenizer = harness_model._text_model.tokenizer
    text = "the cat sat on a mat and the dog ran to it while birds sang"
    ids = [tokenizer.bos_id, *tokenizer.encode(text)]
    [whole] = harness_model.loglikelihood_rolling([Request(text)])
    end = len(ids) - 1
    assert ROW_LENGTH < end < 2 * ROW_LENGTH
    first = plain_log_p(harness_model, ids[: ROW_LENGTH + 1], 1)  # type: ignore[arg-type]
    last = plain_log_p(harness_model, ids[end - ROW_LENGTH :], 2 * ROW_LENGTH + 1 - end)  # type: ignore[arg-type]
    assert whole == pytest.approx(first + last, rel=1e-6)


def test_a_continuation_ends_before_its_stop_text(harness_model: HarnessModel) -> None:
    free, stopped = harness_model.generate_until(
        [Request("the cat", {"until": [], "max_gen_toks": 12}), Request("the cat", {"until": [" "], "max_gen_toks": 12})]
    )
    assert free
    assert stopped == free.split(" ")[0]


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_the_harness_runs_tasks_of_a_folder_without_a_network(
    run: Path, harness_model: HarnessModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    tasks = write_tasks(tmp_path / "tasks")
    results = json.loads(benchmark_run(EvaluateOptions(run=run, as_json=True), str(tasks)))["results"]
    pages = [json.loads(line)["page"] for line in (tasks / "pages.jsonl").read_text().splitlines()]
    log_p = math.fsum(harness_model.loglikelihood_rolling([Request(page) for page in pages]))
    expected = -log_p / sum(len(page.encode()) for page in pages) / math.log(2)
    assert results["tiny_pages"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-5)
    questions = [json.loads(line) for line in (tasks / "questions.jsonl").read_text().splitlines()]
    right = 0
    for question in questions:
        scores = [
            score for score, _ in harness_model.loglikelihood([Request(question["text"], choice) for choice in question["choices"]])
        ]
        right += scores[0] == max(scores)
    assert results["tiny_questions"]["acc,none"] == pytest.approx(right / len(questions))
    table = benchmark_run(EvaluateOptions(run=run, limit=1), str(tasks)).splitlines()
    assert table[0] == "step 12"
    assert [line.split()[0] for line in table[1:]] == ["task", "tiny_pages", "tiny_pages", "tiny_questions"]


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_refused_by_its_name(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task no_such_task"):
        benchmark_run(EvaluateOptions(run=run), "no_such_task")
    with pytest.raises(ConfigError, match="no task in this folder"):
        benchmark_run(EvaluateOptions(run=run), str(tmp_path))

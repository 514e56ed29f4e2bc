"""`make bench`: what is measured is the real thing, and the tables say what was measured. No test depends on a time."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from tests.benchmarks import loss, preparation, reading, saving, starting, steps
from tests.benchmarks.__main__ import PARTS
from tests.benchmarks.bench import NANOGPT, Bench, step_of_trainer, write_characters
from tests.benchmarks.generation import generate
from tests.benchmarks.harness import (
    BEGIN,
    Comparison,
    ContestantError,
    Results,
    Sample,
    busy,
    run_program,
    step_sample,
    tree,
    watch,
)
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT
from trainer.config import ModelConfig
from trainer.model.decoder import build_model

TINY = ModelConfig(layers=2, width=64, heads=4, context=32)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STAND_IN = """
import pickle, sys
from pathlib import Path
import numpy as np
options = dict(word[2:].split("=") for word in sys.argv[1:])
folder = Path("data", options["dataset"])
ids = np.fromfile(folder / "train.bin", np.uint16)
assert ids.max() < pickle.loads((folder / "meta.pkl").read_bytes())["vocab_size"]
assert Path("model.py").exists() and Path("configurator.py").exists()
manual_seed = print
manual_seed(1337 + 0)
print("number of parameters: 0.80M")
print("step 0: train loss 4.3, val loss 4.3")
for number in range(int(options["max_iters"]) + 1):
    print(f"iter {number}: loss 1.0, time 1.00ms, mfu 0%")
print("step 250: train loss 1.9, val loss 1.87")
import time; time.sleep(600 * (options["eval_interval"] == "250"))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A bench with little data in place of that of `make demo`, and a stand-in for nanoGPT that ends its steps at once."""
    folder, nanogpt = tmp_path / "bench", tmp_path / "nanoGPT"
    for path in (folder, nanogpt):
        path.mkdir()
    for name in ("model.py", "configurator.py"):
        (nanogpt / name).touch()
    (nanogpt / "train.py").write_text(STAND_IN)
    write_prepared(folder / "demo", row_length=TINY.context)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 400)
    return Bench(folder, quick=True, nanogpt=nanogpt, peers=tmp_path / "none", shakespeare=text)


def sample(value: float, cpu: float | None = None) -> Sample:
    return Sample(value, cpu, 0.5, {"steps": 3})


def test_contestants_take_turns_and_one_that_is_missing_or_fails_loses_no_other(tmp_path: Path) -> None:
    runs: list[str] = []
    folders: list[Path] = []

    def contestant(name: str, *values: float) -> Sample:
        runs.append(name)
        return sample(values[runs.count(name) - 1], values[runs.count(name) - 1] / 2)

    def fails(_: Path) -> Sample:
        raise ContestantError("out of memory | line")

    def first(folder: Path) -> Sample:
        folders.append(folder)
        assert not [*folder.iterdir()]
        return contestant("first", 1.0, 2.0, 4.0)

    comparison = Comparison(
        "two",
        "Two programs",
        "s",
        {"first": first, "second": lambda _: contestant("second", 3.0, 4.0, 6.0), "absent": NANOGPT, "broken": fails},
        "second",
        goal="2.0 of second",
        rounds=3,
    )
    results = Results(tmp_path)
    assert not results.measure(comparison)
    assert runs == ["first", "second"] * 3
    assert len(set(folders)) == 3
    assert not any(folder.exists() for folder in folders)
    table = (tmp_path / "results.md").read_text()
    assert "### Two programs" in table
    assert "Goal: 2.0 of second." in table
    assert "| first | 2 | 1..4 | 2.00 | 1 | 2.00 | 0.5 | steps 3 |" in table
    assert "| second | 4 | 3..6 |  | 2 |  | 0.5 | steps 3 |" in table
    assert f"| absent | missing | | | | | | {NANOGPT} |" in table
    assert "| broken | failed | | | | | | out of memory / line |" in table
    picture = ElementTree.parse(tmp_path / "two.svg").getroot()
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words == ["Two programs, s", "first", "2", "second", "4", "absent", "not measured", "broken", "not measured"]
    assert set(Results(tmp_path).comparisons) == {"two"}


def test_of_rates_the_higher_is_the_faster(tmp_path: Path) -> None:
    results = Results(tmp_path)
    contestants = {"first": lambda _: sample(10.0, 1.0), "second": lambda _: sample(5.0, 3.0)}
    assert results.measure(Comparison("rates", "Rates", "1/s", contestants, "second", rounds=1, higher_is_better=True))
    assert "| first | 10 | 10..10 | 2.00 | 1 | 3.00 |" in results.describe()


def test_the_tables_and_one_picture_replace_those_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    results = Results(tmp_path / "results")
    for value in (1.0, 2.0):
        results.measure(Comparison("one", "One program", "s", {"first": lambda _, value=value: sample(value)}, "first", rounds=1))
        results.write_docs(page)
    assert page.read_text().count("### One program") == page.read_text().count("| first | 2 | 2..2 |") == 1
    assert page.read_text().endswith((ROOT / "docs" / "benchmarks.md").read_text()[-500:])
    ElementTree.parse(tmp_path / "benchmarks.svg")
    page.write_text("# Benchmarks\n")
    with pytest.raises(SystemExit, match=f"no line {re.escape(BEGIN)}"):
        results.write_docs(page)


def test_cpu_time_is_that_of_the_whole_tree_and_steps_are_read_from_the_lines(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 1.2: pass\nprint('step 1', flush=True)\nwhile time.process_time() < 1.5: pass"
    inner = tmp_path / "inner.py"
    inner.write_text(burn + "\nprint('step 2')\n")
    code = f"import subprocess, sys; subprocess.run([sys.executable, {str(inner)!r}], check=True)"
    watched = watch([sys.executable, "-c", code], step_of=lambda line: int(line.split()[1]))
    assert watched.lines == ("step 1", "step 2")
    # The kernel counts in ticks of 1/100 s for each process and rounds down.
    assert watched.cpu_s >= 1.4
    assert 1.1 <= watched.cpu_at[1] <= watched.cpu_s + 0.1
    assert watched.steps[1] < watched.steps[2] <= watched.wall_s
    assert watched.load >= 0
    outlived = watch([sys.executable, "-c", code.replace("run(", "Popen(").replace(", check=True", "")])
    assert outlived.cpu_s >= 1.4


def test_a_contestant_is_ended_with_all_it_started_at_its_limit_or_at_the_line_that_counts(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import time\nfor number in range(10**6):\n    print('step', number + 1, flush=True)\n    time.sleep(0.02)\n")
    code = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, {str(child)!r}]); print('pid', child.pid); child.wait()"
    )
    command = [sys.executable, "-c", code]
    limited = watch(command, limit_s=3, step_of=lambda line: int(line.split()[1]) if line.startswith("step") else None)
    assert len(limited.steps) > 3
    found = watch(command, until=lambda line: line.startswith("step 2"))
    assert found.lines[-1] == "step 2"
    for watched in (limited, found):
        (pid,) = (line.split()[1] for line in watched.lines if line.startswith("pid"))
        status = Path("/proc", pid, "stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    with pytest.raises(ContestantError, match="exit code 3"):
        watch([sys.executable, "-c", "raise SystemExit(3)"])


def test_busy_loops_end_with_the_comparison() -> None:
    before = tree(os.getpid()).keys()
    with busy(2, limit_s=60.0):
        assert len(tree(os.getpid()).keys() - before) == 2
    assert tree(os.getpid()).keys() <= before


def test_this_project_and_nanogpt_train_on_as_many_weights_for_as_many_steps(bench: Bench, tmp_path: Path) -> None:
    own = steps.own_shakespeare(bench, 1, 26, steps.OWN_SHAKESPEARE, tmp_path / "own")
    assert own.facts["steps"] == 26
    assert own.facts["weights"] in ("0.80M", "0.81M")  # the vocabulary is padded to 64 or 128
    config = ModelConfig(layers=4, width=128, heads=4, kv_heads=4, mlp_width=344, context=65)
    layers = sum(weight.numel() for name, weight in build_model(config, 65, seed=0).named_parameters() if "layers." in name)
    assert layers == pytest.approx(12 * 128 * 128 * 4, rel=0.01)  # four matrices of attention and two of four times the width
    peer = tmp_path / "peer"
    peer.mkdir()
    assert steps.nanogpt_shakespeare(bench, 1, 26, same_settings=False, folder=peer).facts["steps"] == 26


def test_the_peers_in_python_have_the_shape_of_this_project_and_tell_each_step(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks" / "peers"))
    plain_training = importlib.import_module("plain_training")
    settings = bench.settings(TINY, 259, micro=2, steps=6, threads=1)
    own = sum(weight.numel() for weight in build_model(TINY, 259, seed=0).parameters())
    assert sum(weight.numel() for weight in plain_training.Model(settings).parameters()) == own
    for same in (False, True):
        (tmp_path / str(same)).mkdir()
        watched = bench.train_peer("plain_training.py", Path(sys.executable), settings, tmp_path / str(same), same_settings=same)
        assert sorted(watched.steps) == [1, 2, 3, 4, 5, 6]
        assert step_sample(watched, 2).facts["steps"] == len(json.loads(watched.lines[-1])) == 6


def test_the_other_tools_can_run_with_this_projects_allocator(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['THP_MEM_ALLOC_ENABLE'], sys.argv[1:], sys.path[0])\n")
    watched = run_program(ROOT / "tests" / "benchmarks" / "peers" / "same_settings.py", script, "word")
    assert watched.lines == (f"1 ['word'] {tmp_path}",)


def test_all_save_the_same_bytes_as_often(bench: Bench, tmp_path: Path) -> None:
    found = []
    for name, save in (("own", saving.own), ("save", saving.torch_save), ("async_save", saving.torch_save)):
        (tmp_path / name).mkdir()
        words = () if name == "own" else (name,)
        found.append(save(bench, ModelConfig(layers=2, width=256, heads=4, context=32), 4096, *words, tmp_path / name).facts)
    assert {facts["saves"] for facts in found} == {saving.NUM_SAVES}
    assert [facts["MB"] for facts in found] == pytest.approx([found[0]["MB"]] * 3, rel=0.1)
    assert found[0]["MB"] > 10


def test_generation_draws_all_tokens_with_the_cache() -> None:
    made = generate(2, 12)
    assert made["facts"] == {"tokens": 24}


def test_the_rows_of_both_readers_have_the_same_shape(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data", row_length=reading.LENGTH + 1)
    stream = tmp_path / "stream.bin"
    reading.write_stream(data, stream)
    with reading.loader(Rows(data, read_manifest(data), "train"), reading.BATCH, reading.BATCH, 1) as read:
        (micro,) = read().micro_batches
    x, y = reading.crops(stream)
    assert micro.tokens.shape[0] == x.shape[0] == reading.BATCH
    assert micro.tokens.shape[1] in (reading.LENGTH, reading.LENGTH + 1)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert reading.rate(lambda: None, 5)["facts"] == {"batches": 5}


def test_this_pipeline_and_the_builder_write_the_same_tokens(bench: Bench, tmp_path: Path) -> None:
    texts = preparation.Texts(bench)
    lines = [json.dumps({"text": f"{word} is a word of {number} letters. " * 30}) for number, word in enumerate("abcdefgh" * 40)]
    text = bench.folder / "few.jsonl"
    text.write_text("\n".join(lines) + "\n")
    library = preparation.Texts(Bench(bench.folder, quick=True)).all
    assert preparation.size(library) >= preparation.QUICK_BYTES * 0.8
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special, alphabet = ["<pad>", "<unk>", "<bos>", "<eos>"], pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet))
    tokenizer.save(str(texts.folder / "tokenizer.json"))
    for name in ("own", "peer"):
        (tmp_path / name).mkdir()
    own = preparation.own(texts, text, "tokenizer.json", preparation.OFF, tmp_path / "own")
    preparation.peer(texts, text, "tokenizer.json", None, "megatron_style.py", tmp_path / "peer")
    written = (tmp_path / "peer" / "out" / "data.bin").stat().st_size // 2
    assert own.facts["tokens"] == written


def test_the_first_step_of_a_run_and_a_finished_run_are_what_is_timed(bench: Bench, tmp_path: Path) -> None:
    (bench.folder / "smoke").symlink_to(bench.folder / "demo")
    assert starting.first_step(bench, tmp_path / "first").value > 0
    assert starting.finished(bench, tmp_path / "finished").facts == {"steps": 0}


def test_the_time_to_a_loss_ends_at_the_evaluation_that_reaches_it(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "peer"
    folder.mkdir()
    found = loss.nanogpt(bench, 1339, folder)
    assert found.facts == {"steps": 250, "loss": 1.87, "seed": 1339}
    assert "manual_seed(1339" in (folder / "train.py").read_text()
    line = "01:48:25  step 300  validation loss 1.8799  perplexity 81.79"
    assert loss.reached(line, loss.LOSS_OF_OWN)
    assert not loss.reached(line.replace("1.8799", "1.8801"), loss.LOSS_OF_OWN)


def test_characters_have_the_ids_and_the_split_of_nanogpt(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("bcab" * 5)
    paths, vocab = write_characters(text, tmp_path)
    assert vocab == 3
    assert [path.read_bytes() for path in paths.values()] == [b"\1\0\2\0\0\0\1\0" * 4 + b"\1\0\2\0", b"\0\0\1\0"]
    assert step_of_trainer("01:48:18  step 1/12  loss 4.8978") == 1
    assert step_of_trainer("01:48:16  step 0  validation loss 4.9719") is None


def test_every_part_names_its_comparisons_and_without_the_other_tools_the_command_that_installs_them(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    bench = Bench(tmp_path, quick=True, peers=tmp_path / "none")
    found = [comparison for part in PARTS.values() for comparison in part(bench)]
    assert len({comparison.name for comparison in found}) == len(found)
    assert all(comparison.reference in comparison.contestants for comparison in found)
    missing = {one for comparison in found for one in comparison.contestants.values() if isinstance(one, str)}
    assert missing == {NANOGPT, "env/bench-peers", loss.TEXT, preparation.PROSE}

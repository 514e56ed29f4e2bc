"""Mistakes that people make in their first hour, each with the one line that the program answers. None of them changes a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.prepared import write_prepared
from tests.support.runs import ROOT

TRAIN = "train --data data --run runs/first"
SOURCES = "prepare --output prepared --sources"
MISTAKES = {  # the words after `trainer`, and parts of the answer
    "a command that does not exist": ("trian --data data", "'trian' is not a command; did you mean train?"),
    "help for such a command": ("help trian", "'trian' is not a command; did you mean train?"),
    "the learning rate of other programs": (f"{TRAIN} --lr 3e-4", "unrecognized arguments: --lr 3e-4; did you mean --optim.lr?"),
    "and its long name": (f"{TRAIN} --learning_rate 3e-4", "--learning_rate 3e-4; did you mean --optim.lr?"),
    "the steps of other programs": (f"{TRAIN} --steps 5", "--steps 5; did you mean --limits.steps?"),
    "and their other name": (f"{TRAIN} --max_steps 5", "--max_steps 5; did you mean --limits.steps?"),
    "epochs": (f"{TRAIN} --epochs 5", "--epochs 5; did you mean --limits.epochs?"),
    "the batch of other programs": (
        f"{TRAIN} --batch_size 8",
        "--batch_size 8; did you mean --batch.global_batch_size or --batch.micro_batch_size?",
    ),
    "the layers of other programs": (f"{TRAIN} --n_layer 8", "--n_layer 8; did you mean --model.layers?"),
    "the context of other programs": (f"{TRAIN} --block_size 8", "--block_size 8; did you mean --model.context?"),
    "a word for a number": (f"{TRAIN} --limits.steps ten", "limits.steps = 'ten': input should be a valid integer"),
    "a number out of bounds": (f"{TRAIN} --limits.steps 5 --optim.lr -1", "optim.lr = '-1': input should be greater than 0"),
    "no end of the training": (TRAIN, "no limit is set; give limits.steps, limits.epochs, limits.tokens or limits.minutes"),
    "a recipe that does not exist": (
        f"{TRAIN} --recipe smok",
        "recipe 'smok': no file … smok.toml; the recipes are auto, classify, demo, ",
    ),
    "data that does not exist": ("train --data other --run runs/first --limits.steps 5", "run `trainer prepare --output other`"),
    "text instead of prepared data": (
        "train --data text --run runs/first --limits.steps 5",
        "text/manifest.json: no such file, so text holds no finished prepared data; run `trainer prepare --output text`",
    ),
    "heads that do not divide the width": (
        f"{TRAIN} --recipe smoke --model.heads 5",
        "model.width = 64 is not a multiple of model.heads = 5; change one, or set model.head_dim",
    ),
    "only the name of a run that does not exist": ("train --run runs/first", "data is not set; give --data or TRAIN_DATA"),
    "no text": ("prepare", "sources is not set; give --sources PATH, or --sources builtin"),
    "a misspelt setting of prepare": ("prepare --source text", "--source text; did you mean --sources?"),
    "text that does not exist": (f"{SOURCES} texts", "source texts: no such file or folder; check the path"),
    "one file": (f"{SOURCES} text/one.txt", "the text is one file, … add --text.documents paragraphs"),
    "another encoding": (f"{SOURCES} latin.txt", "byte 0xe9 is not UTF-8 … `iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW`"),
    "files that are not text": (f"{SOURCES} binary", "no file with text in it; 1 .bin cannot be read … Formats that are read: "),
    "an empty folder": (f"{SOURCES} empty", "source empty: no file with text in it; it is empty … To do: name another folder"),
    "a broken record": (f"{SOURCES} broken.jsonl", "broken.jsonl:1: not-json: … ; correct the input, or raise that limit"),
    "a misspelt option": ("generate data --promt x", "--promt x; did you mean --prompt?"),
    "data instead of a run": ("generate data", "data: no config.toml, so this is not a run; name a directory that `trainer train"),
    "a run that does not exist": ("verify runs/second", "runs/second: no record.json, so this is not a run"),
    "one run to compare": ("compare runs/first", "fewer than two runs are named; name at least two"),
    "a shell that has no completion": ("completion tcsh", "needs the name of a shell: bash, zsh, fish"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with text, prepared data and files of several kinds."""
    folder = tmp_path_factory.mktemp("first-hour")
    for name in ("text", "binary", "empty"):
        (folder / name).mkdir()
    (folder / "text" / "one.txt").write_text("A text of one line that is long enough to be a document.\n")
    (folder / "binary" / "one.bin").write_bytes(bytes(range(256)))
    (folder / "latin.txt").write_bytes("un résumé du café, assez long pour être un document entier\n".encode("latin-1"))
    (folder / "broken.jsonl").write_text("this is not JSON\n")
    write_prepared(folder / "data")
    return folder


def files_of_the_user(folder: Path) -> list[Path]:
    """Return everything except the output of `prepare`, which keeps its finished work for the next attempt."""
    return sorted(path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "prepared")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_first_hour_is_one_line_with_the_remedy_and_changes_no_file(folder: Path, mistake: str) -> None:
    words, message = MISTAKES[mistake]
    before = files_of_the_user(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRAIN_", "PREP_"))}
    program = [sys.executable, "-m", "trainer.program", *words.split()]
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)
    error = done.stderr.splitlines()[-1]
    assert done.returncode in (2, 3, 4), done.stderr
    assert error.startswith("error: ")
    assert "python -m" not in error
    assert "Traceback" not in done.stderr
    for part in message.split(" … "):
        assert part in error
    assert files_of_the_user(folder) == before
    assert not (folder / "prepared" / "manifest.json").exists()

"""Every command in README.md and docs/guide/ is run in the order of its page, on a small text, or has a reason why it cannot be."""

from __future__ import annotations

import csv
import importlib
import json
import os
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.labelled import labelled_records
from tests.support.published import write_published, write_tokenizer
from tests.support.runs import ROOT

PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in (ROOT / "docs/guide").glob("*.md"))]
NOT_RUN = {
    "make demo": "installs packages and trains for minutes; .ci/run and the tests of env/demo run it",
    "make up": "needs a Docker engine; tests/containers runs it",
    "docker compose up": "needs a Docker engine; tests/containers runs it",
    "env/make-venv .venv": "installs packages; every installation runs it",
    "source .venv/bin/activate": "changes the shell",
    "pip install --no-deps --require-hashes -r env/requirements-models.lock": "installs packages; env/test-optional runs it",
    "TENSORBOARD_LOGDIR=runs entrypoints/tensorboard": "serves until it is stopped; tests/containers runs it",
}
LANGUAGES = {"sh", "text", "python", "toml", ""}
"""The languages of code blocks. Commands are in blocks of the language `sh`."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    return [line for language, text in blocks(page) if language == "sh" for line in text.splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what the pages begin with, an empty folder for containers, the entrypoints, and the program on the path."""
    (tmp_path / "my-text").mkdir()
    for number in range(40):
        lines = [
            f"chapter {number}",
            *(f"The {word} of page {number * line} turns {line} times." for line, word in enumerate(WORDS)),
        ]
        (tmp_path / f"my-text/page-{number}.md").write_text("\n".join(lines))
    write_chats(tmp_path / "my-chats.jsonl")
    write_snippets(tmp_path)
    write_published(tmp_path / "models/small", max_position_embeddings=512)
    (tmp_path / "text").mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/trainer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from trainer.program import main; main()" "$@"\n')
    program.chmod(0o755)
    return tmp_path


WORDS = ["wheel", "river", "engine", "letter", "garden", "window", "market", "bridge", "candle", "forest"]
TYPED = "What does wheel 3 do?\n"
"""What a reader types when a command asks for text."""


def write_chats(path: Path) -> None:
    """Write short conversations, as docs/guide/chat.md shows them."""
    asked = [(f"What does {word} {number} do?", f"The {word} turns {number} times.") for number in range(8) for word in WORDS]
    turns = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in asked]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))


def write_snippets(folder: Path) -> None:
    """Write texts with labels as CSV, and a text without one, as docs/guide/classify.md has them."""
    letters = random.Random(0)
    records = labelled_records(241)
    for record in records:  # enough words for the vocabulary of the recipe
        record["text"] += "".join(" " + "".join(letters.choices(string.ascii_lowercase, k=9)) for _ in range(25))
    with (folder / "snippets.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(records[:-1])
    (folder / "new-snippet.txt").write_text(records[-1]["text"])


def run_commands(page: Path, place: Path) -> dict[str, str]:
    """Run the commands of a page in their order. Return what each one wrote to stdout."""
    own = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    outputs = {}
    for command in commands(page):
        if command in NOT_RUN:
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=place,
            env=os.environ | own,
            input=TYPED,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        outputs[command] = done.stdout
    return outputs


SHRINK = Path("docs/guide/shrink.md")
"""A page whose commands need packages of an optional lock. A separate test runs them, and the programs of the page."""


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if page != SHRINK], ids=str)
def test_the_commands_of_a_page_work_one_after_the_other(page: Path, place: Path) -> None:
    run_commands(page, place)


def test_no_reason_is_left_of_a_command_that_is_gone() -> None:
    assert NOT_RUN.keys() <= {command for page in PAGES for command in commands(page)}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_are_in_blocks_that_are_run(page: Path) -> None:
    for language, text in blocks(page):
        assert language in LANGUAGES
        assert language == "sh" or not re.search(r"^(\$ )?(trainer|make|docker|env/\S+) \S", text, re.MULTILINE), text
    assert all(shlex.split(command) for command in commands(page))


@pytest.mark.long
@pytest.mark.optional
def test_a_published_model_that_transformers_has_saved_is_fine_tuned_as_on_its_page(place: Path) -> None:
    transformers = importlib.import_module("transformers")
    directory, shape = place / "models/small", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    shutil.rmtree(directory)
    write_tokenizer(directory)
    config = transformers.Qwen3Config(
        vocab_size=300, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, **shape
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    run_commands(Path("docs/guide/published-model.md"), place)
    again = transformers.AutoModelForCausalLM.from_pretrained(place / "models/adapted")
    assert type(again).__name__ == "Qwen3ForCausalLM"


@pytest.mark.long
@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
def test_the_programs_of_the_page_about_exports_load_what_its_commands_wrote(place: Path) -> None:
    run_commands(SHRINK, place)
    programs = [text for language, text in blocks(SHRINK) if language == "python"]
    assert len(programs) == 2
    for program in programs:
        own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=place,
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(("The option", "(1, "))

"""Every command that pages, helps and `next` lines show.

Those of README.md and docs/guide/ are run in the order of their page, on a small text and for a shorter time, or have a reason
why they cannot be.
Those of all other pages are understood by the parser of their command. So are those of a report.
The examples of helps and the `next` lines are run.
"""

from __future__ import annotations

import csv
import html
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

from common.command_line import Command
from common.settings.command import loaded
from common.settings.load import load_options, load_settings
from common.settings.model import Settings
from common.settings.options import help_parser
from data_pipeline.commands.table import COMMANDS as OF_DATA
from tests.support.labelled import labelled_records
from tests.support.published import write_published, write_tokenizer
from tests.support.runs import ROOT, write_program
from trainer.launch.command import COMMANDS as OF_TRAINER
from trainer.program import all_commands

PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in (ROOT / "docs/guide").glob("*.md"))]
NOT_RUN = {
    "make demo": "installs packages and trains for minutes; .ci/run and the tests of env/demo run it",
    "make up": "needs a Docker engine; tests/containers runs it",
    "docker compose up": "needs a Docker engine; tests/containers runs it",
    "env/make-venv .venv": "installs packages; every installation runs it",
    "source .venv/bin/activate": "changes the shell",
    "pip install --no-deps --require-hashes -r env/requirements-models.lock": "installs packages; env/make-optional-venv runs it",
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
    write_program(tmp_path / "bin/trainer")
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


SHORTER = 60
"""A training of a page ends after its `--limits.minutes` divided by this number."""


def shortened(command: str) -> str:
    """A busy machine makes a few steps in the shorter time, so that one is replayed."""
    command = re.sub(r"(?<=--replay )\d+", "1", command)
    return re.sub(r"(?<=--limits\.minutes )\d+", lambda minutes: f"{int(minutes[0]) / SHORTER:g}", command)


def run_commands(page: Path, place: Path) -> dict[str, str]:
    """Run the commands of a page in their order. Return what each one wrote to stdout."""
    own = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    outputs = {}
    for command in commands(page):
        if command in NOT_RUN:
            continue
        done = subprocess.run(
            ["bash", "-c", shortened(command)],
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


HISTORY = {Path("docs/decisions.md"), Path("CHANGELOG.md")}
"""Pages about earlier versions, whose commands may be gone."""
ALL_PAGES = sorted(
    {path.relative_to(ROOT) for pattern in ("*.md", "docs/**/*.md", "text/*.md", "examples/*.md") for path in ROOT.glob(pattern)}
    - HISTORY
)
PROGRAMS: dict[tuple[str, ...], dict[str, Command]] = {
    ("trainer",): all_commands(),
    ("python", "-m", "trainer"): OF_TRAINER,
    ("python", "-m", "data_pipeline"): OF_DATA,
}


def shown_commands(page: Path) -> list[str]:
    """Return the commands in code blocks of all languages, each on one line, without a prompt and without words of explanation."""
    lines = [line for _, text in blocks(page) for line in text.replace("\\\n", " ").splitlines()]
    found = [re.sub(r"\s{2,}(?!--).*|\s#.*", "", line.strip().removeprefix("$ ")) for line in lines]
    rows = [(" ".join(program), name) for program, table in PROGRAMS.items() for name in table]
    return [line for line in found if any(f"{line} ".startswith(f"{program} {name} ") for program, name in rows)]


def split_command(command: str) -> tuple[Command, list[str]]:
    """Return the row and the arguments of a command. A shown name of a number is a number, and optional words are there."""
    plain = re.sub(
        r"\b(N|M|STEP|ID)\b", "8", re.sub(r"[\[\]]|…|--(section|SETTING)\S* VALUE", "", command).replace("NAME|FILE", "demo")
    )
    words = shlex.split(re.split(r"\s(?:>|\||&&|;)\s", plain)[0])
    program = max((one for one in PROGRAMS if tuple(words[: len(one)]) == one), key=len)
    name, *arguments = words[len(program) :]
    return PROGRAMS[program][name], arguments


def understood(command: str) -> None:
    """Check the options of a command and their values, without the files that they name. The parser raises an error."""
    row, words = split_command(command)
    model = loaded(row)[0]
    if not issubclass(model, Settings):
        load_options(model, words, help_parser(model, row.name, ""), {})
        return
    recipe = words.index("--recipe") + 1 if "--recipe" in words else 0
    if recipe and not (ROOT / f"env/recipes/{words[recipe]}.toml").is_file():  # `auto`, or a recorded recipe, which names its data
        words[recipe] = "demo"
    if "data" in model.model_fields and "--data" not in words:
        words += ["--data", "data", *([] if recipe else ["--recipe", "demo"])]
    if "--lora.rank" in words and "--optim.kind" not in words:  # as `auto` chooses
        words += ["--optim.kind", "adamw"]
    if "--init" in words:  # its settings are those of a run
        del words[words.index("--init") : words.index("--init") + 2]
    load_settings(model, words, help_parser(model, row.name, ""), {})


@pytest.mark.parametrize("page", ALL_PAGES, ids=str)
def test_the_commands_of_a_page_have_options_that_exist(page: Path) -> None:
    for command in shown_commands(page):
        try:
            understood(command)
        except Exception as error:
            raise AssertionError(f"{page}: {command}: {error}") from error


def test_the_pages_show_commands_outside_the_guide() -> None:
    assert sum(len(shown_commands(page)) for page in ALL_PAGES if page not in PAGES) > 30


_EXAMPLES = {name: getattr(loaded(row)[0], "examples", ()) for name, row in PROGRAMS["trainer",].items()}
WITH_EXAMPLES = {examples: name for name, examples in _EXAMPLES.items() if examples}
"""One command for each list of examples: `plan` and `train` have the same."""


def run_one(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        words, cwd=place, env=os.environ | own, input=TYPED, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def next_line(stderr: str) -> list[str]:
    [line] = re.findall("^next  +(.*)$", stderr, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_EXAMPLES.values())
def test_the_examples_of_a_help_work_one_after_the_other(name: str, place: Path) -> None:
    """A training of a model with one layer is planned as it is shown, and then made with two steps."""
    shutil.copytree(place / "my-text", place / "books")
    (place / "notes.jsonl").write_text("".join(json.dumps({"text": f"note {number}"}) + "\n" for number in range(40)))
    smaller = ("--tokenizer.vocab_size", "400")
    text = run_one(place, "trainer", "help", name).stdout
    shown = [shlex.split(line) for line in re.findall(f"^  (trainer {name} .*)$", text, re.MULTILINE)]
    assert len(shown) >= 3
    if name != "prepare":
        data = ("--sources", "my-text", "--output", "workspace/data", "--recipe", "demo")
        run_one(place, "trainer", "prepare", *data, *smaller)
    for number, words in enumerate(shown):
        if name == "prepare":
            run_one(place, *words, *smaller, "--replace", "true")
            continue
        is_new = number < len(shown) - 1  # the last example continues the run of the first
        small = ("--model.layers", "1") if is_new else ()
        run_one(place, "trainer", "plan", *words[2:], *small)
        run_one(place, "trainer", "train", *words[2:], *small, *(("--limits.steps", "2", "--eval.max_rows", "2") if is_new else ()))


@pytest.mark.long
def test_each_next_line_is_the_command_that_works_next(place: Path) -> None:
    """Text, conversations and pairs with the tokenizer of a run, and labelled texts; then the next line of each training."""
    asked = [json.loads(line)["messages"] for line in (place / "my-chats.jsonl").read_text().splitlines()]
    pairs = [{"prompt": q["content"], "chosen": a["content"], "rejected": a["content"].upper()} for q, a in asked]
    (place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    fields = "--records.prompt_field prompt --records.chosen_field chosen --records.rejected_field rejected"
    common = "--dedup.near false --chat.template plain --tokenizer.path runs/base"
    (place / "FILE").write_text("some text")
    for sources in (
        "my-text --output base --recipe auto",
        f"my-chats.jsonl --output chats --recipe auto --records.messages_field messages {common}",
        f"pairs.jsonl --output pairs {fields} {common}",
        "snippets.csv --output labelled --records.label_field label",
    ):
        words = next_line(run_one(place, "trainer", "prepare", "--sources", *sources.split(), *_vocabulary(sources)).stderr)
        trained = run_one(place, *words, "--limits.steps", "2", "--eval.max_rows", "2")
        run_one(place, *next_line(trained.stderr))
    assert (place / "runs/pairs/record.json").exists()
    commands_of_report((place / "runs/base/report.html").read_text())


def commands_of_report(page: str) -> None:
    """Check that the commands of a report are understood."""
    [shown] = re.findall('<pre class="commands">(.*?)</pre>', page, re.DOTALL)
    found = [line for line in html.unescape(shown).splitlines() if line.startswith("trainer ")]
    assert len(found) >= 3
    for command in found:
        understood(command)


def _vocabulary(sources: str) -> list[str]:
    return [] if "tokenizer.path" in sources or "auto" in sources else ["--tokenizer.vocab_size", "auto"]

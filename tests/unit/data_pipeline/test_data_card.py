import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.config import PrepareConfig
from data_pipeline.data_card import render_card
from data_pipeline.settings import help_parser, load_settings
from tests.support.report_example import HOSTILE, example_manifest, example_report, thinned

REPORT = example_report(2000)
MANIFEST = example_manifest(REPORT)


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n\n", maxsplit=1)[1].split("\n\n## ", maxsplit=1)[0]


def test_the_card_says_what_the_data_is_and_leaves_what_it_cannot_know_to_the_user() -> None:
    card = render_card(MANIFEST)
    assert re.findall("^## (.*)", card, re.MULTILINE) == [
        "Summary", "Licence and use", "Sources", "How it was prepared", "What was removed", "Splits", "Tokenizer", "Lengths",
        "Known limits", "How to reproduce",
    ]  # fmt: skip
    assert f"| root digest | `{MANIFEST.root_digest}` |" in section(card, "Summary")
    assert "| documents | 2,000 kept of 12,809 read |" in section(card, "Summary")
    assert "- Licence of the texts: not stated" in card
    assert f"- books: `part-2.jsonl`, 2.0 MB, `sha256:{2:064x}`" in section(card, "Sources")
    assert "| deduplicate | near-duplicate | 2,873 | 22.4 % |" in section(card, "What was removed")
    assert "Copies of validation documents in training: 0 exact, 0 near." in section(card, "Splits")
    assert "| de | 3,100 | 2,700,000 | 3.33 |" in section(card, "Tokenizer")
    assert "Rows of 1,024 tokens, as set, hold" in section(card, "Lengths")
    assert "Documents of web were lost to duplicates" in section(card, "Known limits")


def test_the_steps_tell_what_the_settings_did() -> None:
    config = PrepareConfig(
        sources=("a",),
        source={"books": {"paths": ["b"], "clean": {"min_chars": 200}}},
        clean={"max_chars": 9000},
        quality={"trusted": "books", "min_perplexity": 12.5},
        augment={"fim_rate": 0.5},
    )
    steps = section(render_card(replace(MANIFEST, config=config.portable)), "How it was prepared")
    assert "documents of 20 to 9,000 characters kept" in steps
    assert "Languages: none was identified, all were kept." in steps
    assert "perplexity under a model trained on books (min perplexity 12.5, max perplexity 1000)" in steps
    assert "fill-in-the-middle of code (50.0 %)" in steps
    assert r"Sources with settings of their own: books (clean.min_chars 200)." in steps
    assert [line.split(".")[0] for line in steps.splitlines()] == [str(number) for number in range(1, len(steps.splitlines()) + 1)]


def test_the_command_and_the_recipe_give_the_settings_back(tmp_path: Path) -> None:
    config = PrepareConfig(
        sources=("corpus/web",),
        source={"books-2": {"paths": ["b"], "weight": 2.5, "clean": {"min_chars": 200}}},
        row_length=512,
        quality={"trusted": "books-2", "max_perplexity": None},
        language={"keep": ["en", "de"]},
        balance={"by": "source", "weights": {"web": 3.0}},
    )
    card = render_card(replace(MANIFEST, config=config.portable, sources=("web", "books-2")))
    recipe, command = re.findall(r"```(?:toml|sh)\n(.*?)\n```", card, re.DOTALL)
    (tmp_path / "recipe.toml").write_text(recipe)
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "data_pipeline", "prepare"]
    assert "PATH/web" in words
    arguments = [str(tmp_path / word) if word == "recipe.toml" else word for word in words[4:]]
    loaded = load_settings(PrepareConfig, arguments, help_parser(PrepareConfig, "prepare", ""))
    assert loaded.portable == config.portable


def test_a_digest_in_the_place_of_a_file_is_explained() -> None:
    config = MANIFEST.config | {"dedup": MANIFEST.config["dedup"] | {"benchmarks": ["sha256:00"]}}
    assert "each digest stands for the path of a file" in render_card(replace(MANIFEST, config=config))
    assert "each digest stands" not in render_card(MANIFEST)


def test_hostile_names_stay_text_and_stay_in_their_cells() -> None:
    report = {
        **REPORT,
        "sources": {HOSTILE: REPORT["sources"]["web"]},
        "languages": {HOSTILE: REPORT["languages"]["en"]},
        "rejected": {HOSTILE: {HOSTILE: 3}},
        "cleaned": {HOSTILE: 1},
        "duplicates": {"alarms": [HOSTILE]},
    }
    inputs = ({"source": HOSTILE, "path": HOSTILE, "bytes": 1, "sha256": HOSTILE},)
    card = render_card(replace(MANIFEST, totals=report, sources=(HOSTILE,), inputs=inputs))
    assert card.encode()
    assert "\u202e" not in card
    assert "\x1b" not in card
    prose = re.sub(r"```.*?```|(?<!\\)`[^`\n]*`", "", card, flags=re.DOTALL)
    assert not re.search("<[a-z/!?]", prose)
    for table in re.findall(r"(?:^\|.*\n)+", card, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_a_fence_in_the_settings_does_not_end_the_recipe() -> None:
    config = {"records": {"text_field": "a````b"}}
    card = render_card(replace(MANIFEST, config=config))
    [recipe] = re.findall(r"^`````toml\n(.*?)\n`````$", card, re.DOTALL | re.MULTILINE)
    assert "a````b" in recipe


def test_the_same_data_has_the_same_card() -> None:
    assert render_card(MANIFEST) == render_card(example_manifest(example_report(2000)))


def test_many_input_files_are_counted_and_not_listed() -> None:
    inputs = tuple({"source": "web", "path": f"{number}.txt", "bytes": 1, "sha256": "sha256:00"} for number in range(50))
    sources = section(render_card(replace(MANIFEST, inputs=inputs)), "Sources")
    assert "- web: and 30 more, listed in `manifest.json`" in sources
    assert "49.txt" not in sources


@pytest.mark.parametrize("seed", range(40))
def test_a_report_with_parts_missing_has_a_card_without_them(seed: int) -> None:
    card = render_card(replace(MANIFEST, totals=thinned(REPORT, random.Random(seed))))
    assert MANIFEST.root_digest in card
    assert "None" not in card


def test_leaks_and_what_was_not_done_are_limits() -> None:
    config = MANIFEST.config | {"dedup": {"exact": True, "near": False}, "language": {"keep": []}}
    limits = section(render_card(replace(MANIFEST, totals={**REPORT, "leaks": {"near": 1}}, config=config)), "Known limits")
    assert "validation loss is too low" in limits
    assert "Near duplicates were not removed." in limits
    assert "Languages were not identified." in limits

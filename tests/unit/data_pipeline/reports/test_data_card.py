import random
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.config import HeuristicConfig, PrepareConfig, portable_settings
from data_pipeline.config.filters import Preset
from data_pipeline.reports.pages import render_card
from tests.support.report_example import HOSTILE, example_manifest, example_report, thinned

REPORT = example_report(2000)
MANIFEST = example_manifest(REPORT)


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n\n", maxsplit=1)[1].split("\n\n## ", maxsplit=1)[0]


def rebuilt(card: str, folder: Path) -> PrepareConfig:
    """Return the settings from the card's recipe and command."""
    recipe, command = re.findall(r"```(?:toml|sh)\n(.*?)\n```", card, re.DOTALL)
    (folder / "recipe.toml").write_text(recipe)
    words = shlex.split(command)
    assert words[:2] == ["trainer", "prepare"]
    arguments = [str(folder / word) if word == "recipe.toml" else word for word in words[2:]]
    return load_settings(PrepareConfig, arguments, help_parser(PrepareConfig, "prepare", ""), {})


def card_of(read: tuple[str, ...], /, **settings: Any) -> tuple[PrepareConfig, str]:
    """Return settings, and the card of data prepared with them in which these sources have documents."""
    config = PrepareConfig(**settings)
    sealed, _ = replace(MANIFEST, config=portable_settings(config), sources=read, totals={}).sealed()
    return config, render_card(sealed)


def test_the_card_describes_the_data_and_leaves_open_questions_to_the_user() -> None:
    card = render_card(MANIFEST)
    assert re.findall("^## (.*)", card, re.MULTILINE) == [
        "Summary", "Licence and use", "Sources", "How it was prepared", "What was not read", "What was removed", "Splits",
        "Tokenizer", "Lengths", "Known limits", "How to reproduce",
    ]  # fmt: skip
    assert f"| root digest | `{MANIFEST.root_digest}` |" in section(card, "Summary")
    assert "| documents | 2,000 kept of 12,809 read |" in section(card, "Summary")
    assert "- Licence of the texts: not stated" in card
    assert f"- books: `part-2.jsonl`, 2.0 MB, `sha256:{2:064x}`" in section(card, "Sources")
    not_read = section(card, "What was not read")
    assert "| unknown-format | .pdf | 2,700 |\n| unknown-format | .docx | 68 |\n| empty | .txt | 3 |" in not_read
    assert "| invalid-utf8 | .txt | 17 |" in not_read
    assert "| deduplicate | near-duplicate | 2,873 | 22.4 % |" in section(card, "What was removed")
    assert "| de | 3,100 | 2,700,000 | 3.33 |" in section(card, "Tokenizer")
    assert "All tried texts decode to the original." in section(card, "Tokenizer")
    assert "Documents that cleaning changed, including those that were rejected later:" in section(card, "What was removed")
    assert "Rows of 1,024 tokens (as set) hold" in section(card, "Lengths")
    assert "Source web lost a larger share of its documents to duplicates" in section(card, "Known limits")


def test_the_steps_describe_the_settings() -> None:
    config = PrepareConfig(
        sources=("a",),
        source={"books": {"paths": ["b"], "clean": {"min_chars": 200}}},
        clean={"max_chars": 9000},
        quality={"trusted": "books", "min_perplexity": 12.5},
        augment={"fim_rate": 0.5},
    )
    steps = section(render_card(replace(MANIFEST, config=portable_settings(config))), "How it was prepared")
    assert "documents of 20 to 9,000 characters kept" in steps
    assert "Languages: identified for prose and web text, all kept." in steps
    assert "perplexity under a model trained on books (min perplexity 12.5, max perplexity 1000)" in steps
    assert "fill-in-the-middle of code (50.0 %)" in steps
    assert r"Sources with their own settings: books (clean.min_chars 200)." in steps
    assert [line.split(".")[0] for line in steps.splitlines()] == [str(number) for number in range(1, len(steps.splitlines()) + 1)]


def test_the_command_and_the_recipe_give_the_settings_back(tmp_path: Path) -> None:
    config, card = card_of(
        ("web", "books-2"),
        sources=("corpus/web",),
        source={"books-2": {"paths": ["b"], "weight": 2.5, "clean": {"min_chars": 200}}},
        row_length=512,
        quality={"trusted": "books-2", "max_perplexity": None},
        language={"keep": ["en", "de"]},
        balance={"by": "source", "weights": {"web": 3.0}},
    )
    loaded = rebuilt(card, tmp_path)
    assert portable_settings(loaded) == portable_settings(config)
    assert loaded.sources == ("PATH/web",)


def test_an_empty_setting_of_a_source_is_in_the_recipe(tmp_path: Path) -> None:
    config, card = card_of(
        ("code",),
        source={
            "code": {
                "paths": ["c"],
                "language": {"keep": []},
                "quality": {"max_perplexity": "none", "max_perplexity_percentile": None},
            }
        },
        language={"keep": ["en"]},
        quality={"max_perplexity_percentile": 90},
    )
    loaded = rebuilt(card, tmp_path)
    assert loaded.for_source("code").language.keep == ()
    assert loaded.for_source("code").quality == config.for_source("code").quality
    assert loaded.quality == config.quality
    assert "code (language.keep empty, quality.max_perplexity none, quality.max_perplexity_percentile none)" in card


def test_the_sources_of_the_recipe_keep_their_order(tmp_path: Path) -> None:
    names = ("web", "books", "unread", "code")
    _, card = card_of(("web", "books", "code"), source={name: {"paths": [name]} for name in names})
    assert list(rebuilt(card, tmp_path).source) == ["web", "books", "code", "unread"]


def test_names_that_need_quotes_in_toml_are_read_back(tmp_path: Path) -> None:
    weights = {"en, de": 1.0, "😀": 2.0, "a.b": 3.0, "": 4.0}
    config, card = card_of(("a",), sources=("a",), balance={"by": "language", "weights": weights})
    assert rebuilt(card, tmp_path).balance == config.balance


def test_thresholds_of_a_preset_that_is_off_are_left_out() -> None:
    _, card = card_of(("a",), sources=("a",))
    assert "Heuristics" not in section(card, "How it was prepared")
    _, card = card_of(("a",), sources=("a",), heuristics={"presets": ["c4", "gopher-repetition"]})
    [line] = re.findall("Heuristics: .*", section(card, "How it was prepared"))
    assert line.startswith(
        "Heuristics: c4 (max curly brackets 0, max lorem ipsum 0, min line words 5, min sentences 3); gopher-repetition ("
    )
    assert "max top ngrams 0.2, 0.18, 0.16" in line
    assert "stop words" not in line


def test_every_threshold_is_listed_with_exactly_one_preset() -> None:
    told = []
    for preset in get_args(Preset):
        _, card = card_of(("a",), sources=("a",), heuristics={"presets": [preset]})
        [line] = re.findall(r"Heuristics: \S+ \((.*)\)", section(card, "How it was prepared"))
        told += [preset.split("-")[0] + "_" + "_".join(name.split()) for name in re.findall("(?:^|, )([a-z][a-z4 ]+) ", line)]
    assert sorted(told) == sorted(HeuristicConfig.model_fields.keys() - {"presets"})


def test_languages_count_as_identified_also_if_all_are_kept() -> None:
    _, card = card_of(("a",), sources=("a",))
    assert "not identified" not in card
    _, card = card_of(("a",), sources=("a",), language={"identify": False})
    assert "Languages: not identified, all kept." in section(card, "How it was prepared")
    assert "Languages were not identified." in section(card, "Known limits")


def test_an_input_in_a_store_shows_the_checksum_of_the_store() -> None:
    inputs = ({"source": "web", "path": "a.txt", "bytes": 1, "checksum": "etag:9f"},)
    assert "- web: `a.txt`, 1 bytes, `etag:9f`" in section(render_card(replace(MANIFEST, inputs=inputs)), "Sources")


def test_a_digest_in_the_place_of_a_file_is_explained() -> None:
    config = MANIFEST.config | {"dedup": MANIFEST.config["dedup"] | {"benchmarks": ["sha256:00"]}}
    assert "each digest by the path of a file" in render_card(replace(MANIFEST, config=config))
    assert "each digest by" not in render_card(MANIFEST)


def test_hostile_names_stay_text_and_stay_in_their_cells() -> None:
    report = {
        **REPORT,
        "sources": {HOSTILE: REPORT["sources"]["web"]},
        "languages": {HOSTILE: REPORT["languages"]["en"]},
        "rejected": {HOSTILE: {HOSTILE: 3}},
        "ignored": {HOSTILE: {HOSTILE: 3}},
        "cleaned": {HOSTILE: 1},
        "duplicates": {"alarms": [HOSTILE], "benchmark_alarms": [HOSTILE]},
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


def markup(card: str) -> list[str]:
    """Return the types of all tokens of a card in order, without text, from a parser with tables and links."""
    renderer = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = [one for block in renderer.parse(card) for one in (block, *(block.children or ()))]
    return [f"{token.type} {token.tag} {token.attrs}" for token in tokens if token.type not in ("text", "text_special")]


def named(name: str) -> str:
    """Return a card with this name in every place that a file or foreign data can name."""
    report = {
        **REPORT,
        "sources": {name: REPORT["sources"]["web"] | {"kind": name}},
        "languages": {name: REPORT["languages"]["en"]},
        "rejected": {name: {name: 3}},
        "cleaned": {name: 1},
        "duplicates": {"alarms": [name], "benchmark_alarms": [name]},
        "rows": {name: REPORT["rows"]["train"]},
    }
    entry = {"source": name, "path": name, "bytes": 1}
    inputs = ({**entry, "sha256": name}, {**entry, "checksum": name})
    config = MANIFEST.config | {
        "records": {"text_field": name, "metadata": [name]},
        "language": {"identify": True, "keep": [name]},
        "heuristics": {"presets": [name]},
        "quality": {"trusted": name, "good": [name]},
        "balance": {"by": "field", "field": name, "weights": {name: 2.0}},
        "source": {name: {"records": {"text_field": name}}},
    }
    manifest = replace(MANIFEST, totals=report, sources=(name,), inputs=inputs, config=config)
    return render_card(replace(manifest, tokenizer_kind=name, tokenizer_digest=name, root_digest=name))


names = st.text(st.sampled_from("ab`|<>[]()!*_~$#-=+&;:/\\.@'\"\n\t \r\x1b\u202e1") | st.characters(), min_size=1, max_size=40)


@given(names.filter(str.strip))
@example("[x](javascript:1) ![y](z) <script>alert(1)</script> <!--")
@example("``` \n# Title\n\n- a\n| b | c |\n")
@example("`a` ``b`` \\")
@example("<https://evil.example> www.evil.example me@evil.example")
@example("12. item")
@example("- item")
@example("&lt;script&gt; &#60;b&#62; $x$ ~~gone~~ ---")
def test_no_name_changes_the_form_of_the_card(name: str) -> None:
    assert markup(named(name)) == markup(named("name"))


@pytest.mark.parametrize(
    "name", ["http://evil.example/x", "see https://evil.example", "www.evil.example", "a@evil.example", "@someone"]
)
def test_no_name_becomes_a_link_where_addresses_do(name: str) -> None:
    prose = re.sub(r"```.*?```|(?<!\\)`[^`\n]*`", "", named(name), flags=re.DOTALL)
    assert not re.search(r"(?<!\\)://|(?i:\bwww\.)|(?<!\\)@", prose)


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


def test_skipped_steps_are_limits() -> None:
    config = MANIFEST.config | {"dedup": {"exact": True, "near": False}, "language": {"identify": False}}
    limits = section(render_card(replace(MANIFEST, config=config)), "Known limits")
    assert "Near duplicates were not removed." in limits
    assert "Languages were not identified." in limits

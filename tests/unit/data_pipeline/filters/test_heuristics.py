import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import HeuristicConfig
from data_pipeline.config.filters import Preset
from data_pipeline.documents import Reason, Stage
from data_pipeline.filters.judge import BrokenRule, judge_form
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.text import TextBatch

PROSE = tuple(name for name, preset in PRESETS.items() if not preset.for_code)
RULES = [(name, rule) for name, preset in PRESETS.items() for rule in preset.rules]
VOCABULARY = """
    river house mountain letter question morning winter garden window teacher village story summer doctor island bridge
    carries follows remembers changes describes reaches leaves answers crosses watches builds opens closes finds sells paints
    green heavy quiet ancient narrow bright hollow gentle distant hungry silver broken wooden bitter empty frozen
    slowly often never gladly almost hardly again together before after under beside without during against towards
"""
WORDS = VOCABULARY.split()


def sentence(generator: random.Random) -> str:
    first, *others = generator.sample(WORDS, 12)
    for place, word in ((2, "the"), (5, "of the"), (8, "and"), (10, "that")):
        others.insert(place, word)
    return f"{first.capitalize()} {' '.join(others)}."


def paragraphs(number: int = 4, sentences: int = 3, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(sentence(generator) for _ in range(sentences)) for _ in range(number)]


GOOD = "\n\n".join(paragraphs())
LINES = paragraphs(12, 1)


def judge(text: str, *presets: Preset, kind: str = "prose", language: str = "en", **thresholds: object) -> BrokenRule | None:
    settings = HeuristicConfig(presets=presets, **thresholds)
    return judge_form(TextBatch([text.encode()]), [kind], [language], settings)[0]


def spread(extra: str, number: int) -> str:
    """Good text with something more behind each of its lines, so often as there is need."""
    return "\n".join(f"{LINES[place % 12]} {extra}." for place in range(number))


def between_words(text: str, extra: str) -> str:
    return " ".join(f"{word} {extra}" for word in text.split())


# One text for each rule: it breaks this rule, and none of its preset that comes before it.
BROKEN: dict[str, tuple[Preset, str]] = {
    "gopher-word-count": ("gopher-quality", "The word of the day and that is all that there is to say."),
    "gopher-word-length": ("gopher-quality", "a b c d the of e f " * 20),
    "gopher-symbols": ("gopher-quality", "the #house #of #cards and #all #that " * 10),
    "gopher-bullet-lines": ("gopher-quality", "\n".join(f"  • {line}" for line in LINES)),
    "gopher-ellipsis-lines": ("gopher-quality", "\n".join([*LINES[:6], *(f"{line[:-1]}…" for line in LINES[6:])])),
    "gopher-alphabetic": ("gopher-quality", GOOD + " 1234 - 5678 |" * 50),
    "gopher-stop-words": ("gopher-quality", GOOD.replace("the", "all").replace("and", "all").replace("that", "all")),
    "gopher-duplicate-paragraphs": (
        "gopher-repetition",
        "\n\n".join([*paragraphs(3), "Read more\nhere", "READ more\nhere!", "Read more\nhere"]),
    ),
    "gopher-duplicate-paragraph-chars": ("gopher-repetition", "\n\n".join([*paragraphs(3), paragraphs(1)[0]])),
    "gopher-duplicate-lines": ("gopher-repetition", "\n".join([*LINES[:6], *["Read more"] * 5])),
    "gopher-duplicate-line-chars": (
        "gopher-repetition",
        "\n".join([*LINES[:3], "short", "shorter", LINES[0] * 2, LINES[0] * 2]),
    ),
    "gopher-top-ngrams": ("gopher-repetition", "\n".join(f"{line} extraordinarily interesting archaeology" for line in LINES)),
    "gopher-duplicate-ngrams": ("gopher-repetition", f"{GOOD} {' '.join(GOOD.split()[3:50])}"),
    "c4-curly-bracket": ("c4", GOOD + " if (a) { b }."),
    "c4-lorem-ipsum": ("c4", GOOD + " Lorem Ipsum dolor sit amet."),
    "c4-sentences": ("c4", "\n".join([*LINES[:2], "And this line has no end that one could see", "Too short."])),
    "fineweb-punctuated-lines": ("fineweb", "\n".join(line[:-1] for line in LINES)),
    "fineweb-short-lines": ("fineweb", "\n".join([*LINES[:2], *(f"{line[:20]}." for line in LINES[2:8])])),
    "fineweb-duplicate-line-chars": ("fineweb", "\n".join([*LINES[:6], LINES[0]])),
    "fineweb-newlines": ("fineweb", "\n\n\n\n\n\n\n\n\n".join(LINES)),
    "spam-repeated": ("spam", GOOD + "!" * len(GOOD)),
    "spam-urls": ("spam", between_words(GOOD, "https://example.org/page")),
    "spam-digits": ("spam", between_words(GOOD, "12345")),
    "spam-symbols": ("spam", between_words(GOOD, "<+*+>")),
    "spam-upper-case": ("spam", GOOD.upper()),
    "spam-keyword": ("spam", between_words(GOOD, "casino")),
    "spam-blobs": ("spam", f"{GOOD} {'aGVsbG8gd29ybGQgaGVsbG8gd29ybGQg' * 8}"),
    "code-line-length": ("code", "x = 1\n" * 100 + f"data = '{'ab' * 600}'\n"),
    "code-mean-line-length": ("code", f"value = function({', '.join(WORDS)})\n" * 9),
    "code-alphanumeric": ("code", "+-*/ = [[], ()]; " * 5),
    "code-generated": ("code", "# -*- coding -*-\n# Automatically generated by a tool. DO NOT EDIT.\nx = 1\n"),
}


def kind_of(preset: Preset) -> str:
    return "code" if PRESETS[preset].for_code else "prose"


GOOD_CODE = 'def area(width, height):\n    """The area."""\n    return width * height\n\n\n# do not edit\nprint(area(1, 2))\n'


def test_every_rule_has_its_text() -> None:
    assert {(preset, reason) for reason, (preset, _) in BROKEN.items()} == {(rule_set, rule.reason) for rule_set, rule in RULES}
    assert all(Reason(reason).stage is Stage.JUDGE and not Reason(reason).malformed for reason in BROKEN)


@pytest.mark.parametrize("preset", PROSE)
def test_good_prose_keeps_all_rules(preset: Preset) -> None:
    assert judge(GOOD, preset) is None


def test_good_code_keeps_the_rules_for_code() -> None:
    assert judge(GOOD_CODE, "code", kind="code") is None


@pytest.mark.parametrize("reason", BROKEN)
def test_a_text_is_rejected_for_the_rule_that_it_breaks(reason: str) -> None:
    preset, text = BROKEN[reason]
    broken = judge(text, preset, kind=kind_of(preset))
    assert broken is not None
    assert broken.reason == reason


@pytest.mark.parametrize("reason", BROKEN)
def test_the_detail_names_the_value_and_the_setting_which_can_be_changed(reason: str) -> None:
    preset, text = BROKEN[reason]
    broken = judge(text, preset, kind=kind_of(preset))
    assert broken is not None
    what, bound = broken.detail.rsplit(", ", 1)
    value = float(what.rsplit(": ", 1)[1])
    setting, threshold = bound.removeprefix("heuristics.").split(" = ")
    name, _, place = setting.partition("[")
    is_least = next(rule.is_least for _, rule in RULES if rule.setting == name)
    assert value < float(threshold) if is_least else value > float(threshold)
    default = getattr(HeuristicConfig(), name)
    lenient = 0 if is_least else (1,) * len(default) if place else 1 if 0 < default < 1 else 10**6
    other = judge(text, preset, kind=kind_of(preset), **{name: lenient})
    assert other is None or name not in other.detail


SHORT = "\n\nRead more.\n\nRead more."
# For each threshold a value and a text that is kept under the default, and rejected under this value.
STRICT: dict[str, tuple[Preset, object, str]] = {
    "gopher_min_words": ("gopher-quality", 1000, GOOD),
    "gopher_max_words": ("gopher-quality", 20, GOOD),
    "gopher_min_word_length": ("gopher-quality", 9, GOOD),
    "gopher_max_word_length": ("gopher-quality", 3, GOOD),
    "gopher_max_symbols": ("gopher-quality", 0, f"{GOOD} #one."),
    "gopher_max_bullet_lines": ("gopher-quality", 0, f"{GOOD}\n- One more line."),
    "gopher_max_ellipsis_lines": ("gopher-quality", 0, f"{GOOD}\nAnd so on…"),
    "gopher_min_alphabetic": ("gopher-quality", 1, f"{GOOD} 5"),
    "gopher_min_stop_words": ("gopher-quality", 8, GOOD),
    "gopher_max_duplicate_lines": ("gopher-repetition", 0, GOOD + SHORT),
    "gopher_max_duplicate_paragraphs": ("gopher-repetition", 0, GOOD + SHORT),
    "gopher_max_duplicate_line_chars": ("gopher-repetition", 0, GOOD + SHORT),
    "gopher_max_duplicate_paragraph_chars": ("gopher-repetition", 0, GOOD + SHORT),
    "gopher_max_top_ngrams": ("gopher-repetition", (0, 0, 0), GOOD),
    "gopher_max_duplicate_ngrams": ("gopher-repetition", (0,) * 6, f"{GOOD} {' '.join(GOOD.split()[:8])}."),
    "c4_min_sentences": ("c4", 100, GOOD),
    "c4_min_line_words": ("c4", 1000, GOOD),
    "fineweb_min_punctuated_lines": ("fineweb", 1, f"{GOOD}\nThis line has no end that one could see"),
    "fineweb_max_short_lines": ("fineweb", 0, f"{GOOD}\nA short line."),
    "fineweb_short_line_chars": ("fineweb", 10_000, GOOD),
    "fineweb_max_duplicate_line_chars": ("fineweb", 0, GOOD + SHORT),
    "fineweb_max_newlines": ("fineweb", 0, GOOD),
    "spam_max_repeated": ("spam", 0, f"{GOOD} {'!' * 10}"),
    "spam_max_urls": ("spam", 0, f"{GOOD} https://example.org/page"),
    "spam_max_digits": ("spam", 0, f"{GOOD} 5"),
    "spam_max_symbols": ("spam", 0, GOOD),
    "spam_max_upper_case": ("spam", 0, GOOD),
    "spam_max_keyword": ("spam", 0, GOOD),
    "spam_max_blobs": ("spam", 0, f"{GOOD} {'ab' * 25}"),
    "code_max_line_chars": ("code", 10, GOOD_CODE),
    "code_max_mean_line_chars": ("code", 5, GOOD_CODE),
    "code_min_alphanumeric": ("code", 0.99, GOOD_CODE),
}
# Those whose default allows nothing: a value under which the text of its reason is kept.
LENIENT: dict[str, tuple[str, object]] = {
    "c4_max_curly_brackets": ("c4-curly-bracket", 1),
    "c4_max_lorem_ipsum": ("c4-lorem-ipsum", 1),
    "code_max_generated": ("code-generated", 3),
}


@pytest.mark.parametrize("name", STRICT)
def test_a_stricter_threshold_rejects_what_the_default_keeps(name: str) -> None:
    preset, value, text = STRICT[name]
    assert judge(text, preset, kind=kind_of(preset)) is None
    broken = judge(text, preset, kind=kind_of(preset), **{name: value})
    assert broken is not None
    judged_by = {"c4_min_line_words": "c4_min_sentences", "fineweb_short_line_chars": "fineweb_max_short_lines"}.get(name, name)
    assert judged_by in broken.detail
    others: list[Preset] = [other for other in (*PROSE, "code") if other != preset]
    assert all(
        judge(text, other, kind=kind_of(other), **{name: value}) == judge(text, other, kind=kind_of(other)) for other in others
    )


@pytest.mark.parametrize("name", LENIENT)
def test_a_more_lenient_threshold_keeps_what_the_default_rejects(name: str) -> None:
    reason, value = LENIENT[name]
    preset, text = BROKEN[reason]
    assert judge(text, preset, kind=kind_of(preset)) is not None
    assert judge(text, preset, kind=kind_of(preset), **{name: value}) is None


def test_every_threshold_is_tried() -> None:
    assert {*STRICT, *LENIENT} == HeuristicConfig.model_fields.keys() - {"presets"}


def test_the_help_of_a_threshold_states_its_direction_and_so_does_its_name() -> None:
    for _, rule in RULES:
        assert f": {'at least' if rule.is_least else 'at most'} this " in str(
            HeuristicConfig.model_fields[rule.setting].description
        )
        assert ("_min_" if rule.is_least else "_max_") in rule.setting


def test_nothing_is_judged_unless_a_preset_is_chosen() -> None:
    assert HeuristicConfig().presets == ()
    assert all(judge(text) is None for _, text in BROKEN.values())


def test_rules_for_prose_leave_code_alone_and_the_other_way_round() -> None:
    for preset, text in BROKEN.values():
        assert judge(text, *(PROSE if preset != "code" else ("code",)), kind="prose" if preset == "code" else "code") is None


def test_the_published_thresholds_are_the_defaults() -> None:
    settings = HeuristicConfig()
    assert (settings.gopher_min_words, settings.gopher_max_words) == (50, 100_000)
    assert (settings.gopher_min_word_length, settings.gopher_max_word_length) == (3, 10)
    assert (settings.gopher_max_symbols, settings.gopher_max_bullet_lines, settings.gopher_max_ellipsis_lines) == (0.1, 0.9, 0.3)
    assert (settings.gopher_min_alphabetic, settings.gopher_min_stop_words) == (0.8, 2)
    assert (settings.gopher_max_duplicate_lines, settings.gopher_max_duplicate_paragraphs) == (0.3, 0.3)
    assert (settings.gopher_max_duplicate_line_chars, settings.gopher_max_duplicate_paragraph_chars) == (0.2, 0.2)
    assert settings.gopher_max_top_ngrams == (0.2, 0.18, 0.16)
    assert settings.gopher_max_duplicate_ngrams == (0.15, 0.14, 0.13, 0.12, 0.11, 0.1)
    assert (settings.c4_min_sentences, settings.c4_min_line_words) == (3, 5)
    assert (settings.fineweb_min_punctuated_lines, settings.fineweb_max_duplicate_line_chars) == (0.12, 0.1)
    assert (settings.fineweb_max_short_lines, settings.fineweb_short_line_chars, settings.fineweb_max_newlines) == (0.67, 30, 0.3)


any_text = (
    st.sampled_from([GOOD, *(text for _, text in BROKEN.values())])
    | st.text(st.sampled_from("ab .,!?\n\"'-•…#{}01日本。é\t"), max_size=60)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
)


@given(st.lists(st.tuples(any_text, st.sampled_from(["prose", "web", "code"]), st.sampled_from(["en", "de", "und"])), max_size=5))
def test_a_text_is_judged_alike_alone_and_among_others(documents: list[tuple[str, str, str]]) -> None:
    settings = HeuristicConfig(presets=(*PROSE, "code"), gopher_min_words=0)
    texts, kinds, languages = (list(column) for column in zip(*documents, strict=True)) if documents else ([], [], [])
    together = judge_form(TextBatch([text.encode() for text in texts]), kinds, languages, settings)
    alone = [
        judge_form(TextBatch([text.encode()]), [kind], [language], settings)[0]
        for text, kind, language in zip(texts, kinds, languages, strict=True)
    ]
    assert together == alone


def test_stop_words_are_asked_for_in_english_only() -> None:
    text = BROKEN["gopher-stop-words"][1]
    assert judge(text, "gopher-quality", language="en") is not None
    assert judge(text, "gopher-quality", language="de") is None
    assert judge(text, "gopher-quality", language="und") is None


CHINESE = "这是一个关于公园里的狗和孩子们的故事。他们每天早上都去那里玩耍，天气很好的时候还会野餐。"  # noqa: RUF001
CHINESE += "村里的老师常常给学生讲山那边的河流和岛屿。没有人知道那封信是谁写的，也没有人问过。"  # noqa: RUF001


@pytest.mark.parametrize("preset", PROSE)
def test_prose_in_a_script_without_spaces_keeps_all_rules(preset: Preset) -> None:
    assert judge(CHINESE, preset, language="zh") is None


def test_words_of_scripts_with_spaces_have_a_length_everywhere() -> None:
    broken = judge("слово и а в о у к с " * 20, "gopher-quality", language="ru")  # noqa: RUF001
    assert broken is not None
    assert broken.reason == "gopher-word-length"


def test_repeated_characters_count_in_other_scripts_too() -> None:
    broken = judge(CHINESE + "！" * 60, "spam", language="zh")  # noqa: RUF001
    assert broken is not None
    assert broken.reason == "spam-repeated"


def test_a_word_that_comes_twice_in_a_few_is_no_keyword() -> None:
    assert judge("Casino royale is a film. Casino is another.", "spam") is None


def test_long_words_of_other_scripts_are_no_blobs() -> None:
    assert judge(GOOD + " " + "αβγ" * 60, "spam") is None


def test_separators_of_spaces_and_blank_lines_are_no_spam() -> None:
    assert judge("\n\n\n\n\n\n\n\n\n\n\n\n".join(line + " " * 40 for line in LINES), "spam") is None


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One sentence stands on this line. Another one follows it! Does a third?", 3),
        ('He said that "nobody knows it." Then he went away.', 2),
        ("Version 1.2 of the file a.txt is here to stay.", 1),
        ("This one has dots at its end...", 0),
        ("Only four words here.", 0),
        ("Please enable JavaScript to read this page. It is good.", 0),
        ("We use cookies to make the page better. It is good.", 0),
        (f"There is a word of {'x' * 1001} letters in it.", 0),
        ("A line with a verb and quotes is one \u201csentence\u201d", 1),
        ("今天天气很好。我们去公园吧！你来吗？", 3),  # noqa: RUF001
        ("The first line has an end.\n!!!\n\n. . .\nThe second line has an end.", 2),
    ],
)
def test_sentences_are_counted_in_the_lines_that_c4_keeps(text: str, sentences: int) -> None:
    assert judge(text, "c4", c4_min_sentences=sentences) is None
    broken = judge(text, "c4", c4_min_sentences=sentences + 1)
    assert broken == BrokenRule(
        "c4-sentences", f"sentences in proper lines: {sentences}, heuristics.c4_min_sentences = {sentences + 1}"
    )


def duplicate_share(text: str, n: int) -> float:
    """Of characters: words in runs of n that were there before, each word once (Rae et al. 2021, table A1)."""
    words = text.replace(".", " ").replace(",", " ").split()
    keys = [word.lower() for word in words]
    grams = [tuple(keys[place : place + n]) for place in range(len(words) - n + 1)]
    seen, covered = set(), set()
    for place, gram in enumerate(grams):
        if gram in seen:
            covered |= set(range(place, place + n))
        seen.add(gram)
    return sum(len(words[place]) for place in covered) / len(text)


@given(st.lists(st.sampled_from(paragraphs(3, 2)), min_size=1, max_size=6).map("\n".join), st.integers(0, 5))
def test_duplicate_runs_cover_the_characters_that_table_a1_says(text: str, place: int) -> None:
    share = duplicate_share(text, 5 + place)
    for bound, breaks in ((share - 1e-6, True), (share + 1e-6, False)):
        bounds = [1.0] * 6
        bounds[place] = min(max(bound, 0.0), 1.0)
        kept = {"gopher_max_top_ngrams": (1, 1, 1)} | {
            f"gopher_max_duplicate_{name}": 1 for name in ("lines", "paragraphs", "line_chars", "paragraph_chars")
        }
        broken = judge(text, "gopher-repetition", gopher_max_duplicate_ngrams=tuple(bounds), **kept)
        assert (broken is not None) == (breaks and share > 0)


@pytest.mark.parametrize("text", ["", " ", "\n", "\n\n\n", "x", ".", "…", "日"])
def test_the_smallest_texts_are_judged_without_complaint(text: str) -> None:
    for preset in (*PROSE, "code"):
        judge(text, preset, kind=kind_of(preset))
    assert judge_form(TextBatch([]), [], [], HeuristicConfig(presets=PROSE)) == []

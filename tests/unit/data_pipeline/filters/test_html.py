import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import WorkerError
from data_pipeline.config import HtmlConfig, LimitConfig
from data_pipeline.filters import html as html_module
from data_pipeline.filters.html import Extracted, PageReader

CHILD = Path(html_module.__file__).with_name("html_child.py")
MAIN, ALL = HtmlConfig(extract="main"), HtmlConfig(extract="all")
PAGE = """<!DOCTYPE html><html><head><title>The title</title><style>p {}</style><script>var x = "<p>script</p>";</script></head>
<body><nav><ul><li><a href="/">Home page</a></li><li><a href="/about">About us</a></li></ul></nav>
<article><h1>A heading</h1><p>The first <b>para</b>graph &amp; its caf&eacute;.</p><!-- a comment -->
<ul><li>one</li><li>two</li></ul><pre>  kept
    as it is</pre><img alt="a picture" src="x.png"></article>
<template>hidden</template><footer>Copyright notice</footer></body></html>"""


def html_to_text(page: str, settings: HtmlConfig) -> Extracted:
    with PageReader(LimitConfig()) as pages:
        return pages.text_of(page, settings)


@pytest.fixture(scope="module")
def shared_pages() -> Iterator[PageReader]:
    with PageReader(LimitConfig()) as reader:
        yield reader


@pytest.fixture
def pages() -> Iterator[PageReader]:
    with PageReader(LimitConfig()) as reader:
        yield reader


def test_the_main_content_comes_without_navigation_and_footer() -> None:
    extracted = html_to_text(PAGE, MAIN)
    assert extracted.rule == "html-main"
    assert "A heading\n\nThe first paragraph & its café." in extracted.text
    assert "  kept\n    as it is" in extracted.text
    for unwanted in ("Home page", "Copyright", "script", "{}", "comment", "title", "picture", "hidden"):
        assert unwanted not in extracted.text


def test_everything_comes_with_navigation_but_without_what_is_invisible() -> None:
    extracted = html_to_text(PAGE, ALL)
    assert extracted.rule == "html-all"
    for wanted in ("Home page", "About us", "The first paragraph & its café.", "• one", "Copyright notice"):
        assert wanted in extracted.text
    for unwanted in ("script", "{}", "comment", "title", "picture", "hidden"):
        assert unwanted not in extracted.text


def test_a_page_that_is_nothing_but_boilerplate_is_taken_whole() -> None:
    extracted = html_to_text("<nav><a href=/>Home</a> <a href=/b>Other</a></nav>", MAIN)
    assert (extracted.rule, extracted.text.split()) == ("html-all", ["Home", "Other"])


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("", ""),
        ("no tags at all", "no tags at all"),
        ("a\0b", "ab"),
        ("<p>unclosed <b>tags", "unclosed tags"),
        ("&#xD800;&#0;&lt;&notanentity;", "\ufffd\ufffd<¬anentity;"),
        ("<p title='" + "x" * 1_000_000 + "'>text</p>", "text"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
    ],
)
def test_odd_pages_are_read_as_a_browser_reads_them(page: str, text: str) -> None:
    extracted = html_to_text(page, MAIN)
    assert extracted.text == text
    assert extracted.rule != "html-stripped"


# Each would take minutes, or gigabytes, in a parser that builds the tree.
PATHOLOGICAL = {
    "elements in elements": "<div>" * 100_000 + "text",
    "elements in elements, closed": "<div>" * 100_000 + "text" + "</div>" * 100_000,
    "attributes": "<p " + " ".join(f"a{number}='>'" for number in range(100_000)) + ">text</p>",
    "attributes without values": "<p " + " ".join(f"a{number}" for number in range(100_000)) + ">text</p>",
    "lists in lists": "<ul><li>" * 20_000 + "text" + "<li>text" * 20_000,
    "lists in lists, not deeper than other elements": "<ul>" * 100 + "<li>text" * 1000,
    "inline elements": "<b><i>" * 50_000 + "text",
}


@pytest.mark.parametrize("case", PATHOLOGICAL)
def test_pages_that_no_author_writes_are_only_stripped_of_their_tags(case: str) -> None:
    extracted = html_to_text(PATHOLOGICAL[case], MAIN)
    assert extracted.rule == "html-stripped"
    assert "text" in extracted.text


def test_stripping_keeps_words_together_and_lines_apart() -> None:
    page = "<div>" * 300 + "<p>so<b>me</b> text &amp; <script>no</script>more</p><p>next</p><!-- not this --><style>nor this"
    assert html_to_text(page, MAIN).text == "some text & more\nnext"


@pytest.mark.parametrize("noise", ["<!-- ", "<script>", "</", "<a ", "&", "<", " ", '<a b="', "<head", "\n "])
def test_noise_is_stripped_in_time_that_grows_with_its_length(noise: str) -> None:
    html_to_text("<div>" * 300 + noise * 200_000 + "x", ALL)  # quadratic time would not come to an end


def test_no_memory_is_held_for_the_names_of_tags_after_their_page() -> None:
    tracemalloc.start()
    for number in range(20):
        html_to_text(f"<{'a' * 1_000_000}{number}>" + "<div>" * 300 + "text", MAIN)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 4_000_000


def test_a_page_with_many_unclosed_but_harmless_tags_keeps_its_main_content() -> None:
    page = "<article>" + "<p>A paragraph of some length<br>in two lines<li>and an item" * 1000 + "</article>"
    assert html_to_text(page, MAIN).rule == "html-main"


UNCLOSED = "<div>" + "".join(f"<font id={number}>" for number in range(240)) + "</div>"

# The tree of each grows with the square of its length, and only the rules of the parser tell.
AMPLIFIED = {
    "unclosed elements that each paragraph holds again": UNCLOSED + "<p>text</p>" * 4000,
    "more of them, which ended the preparation": UNCLOSED + "<p>text</p>" * 44_000,
    "an attribute that each paragraph holds again": f"<div><font a={'y' * 100_000}></div>" + "<p>text</p>" * 10_000,
    "elements that add up": "".join(f"<p><font id={number}>text" for number in range(2000)),
}


@pytest.mark.parametrize("case", AMPLIFIED)
def test_a_page_whose_tree_is_far_larger_than_the_page_is_only_stripped_of_its_tags(pages: PageReader, case: str) -> None:
    extracted = pages.text_of(AMPLIFIED[case], MAIN)
    assert extracted.rule == "html-stripped"
    assert set(extracted.text.split()) == {"text"}
    assert pages.text_of(PAGE, MAIN).rule == "html-main"  # the next page is parsed again


def test_a_page_that_the_parser_spends_too_much_time_on_is_only_stripped_of_its_tags(
    pages: PageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_module, "_SECONDS", 0)
    assert pages.text_of("<div></x>" * 40_000 + "text", MAIN) == Extracted("text", "html-stripped")


def test_the_memory_of_a_page_follows_from_its_length_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = "<p>x" * 200_000  # 144 bytes of memory for each of its bytes
    assert html_to_text(dense, MAIN).rule == "html-main"
    with PageReader(LimitConfig(reader_memory_bytes=64 << 20)) as pages:
        assert pages.text_of(dense, MAIN).rule == "html-stripped"


def test_this_process_takes_no_more_memory_for_a_page_than_the_page_does(pages: PageReader) -> None:
    before = _peak_bytes()
    pages.text_of(AMPLIFIED["elements that add up"], MAIN)
    assert _peak_bytes() - before < 16 << 20


def _peak_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_the_result_for_a_page_does_not_depend_on_the_pages_before_it(pages: PageReader) -> None:
    alone = {case: html_to_text(page, MAIN) for case, page in AMPLIFIED.items()}
    for page in (PAGE, "<p>x" * 200_000, *AMPLIFIED.values(), PAGE):
        pages.text_of(page, MAIN)
    assert {case: pages.text_of(page, MAIN) for case, page in AMPLIFIED.items()} == alone


def test_a_parser_that_is_killed_from_outside_is_an_error_and_not_a_page_without_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(f"import os, time\nos.kill(os.getpid(), {int(signal.SIGKILL)})\ntime.sleep(60)")
    monkeypatch.setattr(html_module, "_CHILD", child)
    expected = r"the process that parses HTML was ended by SIGKILL; .*fewer --workers"
    with PageReader(LimitConfig()) as pages, pytest.raises(WorkerError, match=expected):
        pages.text_of(PAGE, MAIN)


def test_the_parser_has_no_environment_and_ends_with_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "found"
    child = tmp_path / "child.py"
    tell = f"    open({str(found)!r}, 'w').write(repr((os.getpid(), dict(os.environ))))\n    main()"
    child.write_text(CHILD.read_text().replace("    main()", tell))
    monkeypatch.setattr(html_module, "_CHILD", child)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with PageReader(LimitConfig()) as pages:
        assert pages.text_of(PAGE, MAIN).rule == "html-main"
        process, environment = eval(found.read_text())  # of this test's own making
        os.kill(process, 0)
    assert "hunter2" not in str(environment)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@given(st.text(st.sampled_from("<>/abpdiv!-=\"' &;\0\n")) | st.text(st.characters(exclude_categories=["Cs"])))
def test_no_page_raises_and_the_text_is_unicode(shared_pages: PageReader, page: str) -> None:
    for settings in (MAIN, ALL):
        shared_pages.text_of(page, settings).text.encode()

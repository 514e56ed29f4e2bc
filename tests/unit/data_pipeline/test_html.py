import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import HtmlSettings
from data_pipeline.html import html_to_text

MAIN, ALL = HtmlSettings(extract="main"), HtmlSettings(extract="all")
PAGE = """<!DOCTYPE html><html><head><title>The title</title><style>p {}</style><script>var x = "<p>script</p>";</script></head>
<body><nav><ul><li><a href="/">Home page</a></li><li><a href="/about">About us</a></li></ul></nav>
<article><h1>A heading</h1><p>The first <b>para</b>graph &amp; its caf&eacute;.</p><!-- a comment -->
<ul><li>one</li><li>two</li></ul><pre>  kept
    as it is</pre><img alt="a picture" src="x.png"></article>
<template>hidden</template><footer>Copyright notice</footer></body></html>"""


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


def test_a_page_with_many_unclosed_but_harmless_tags_keeps_its_main_content() -> None:
    page = "<article>" + "<p>A paragraph of some length<br>in two lines<li>and an item" * 1000 + "</article>"
    assert html_to_text(page, MAIN).rule == "html-main"


@given(st.text(st.sampled_from("<>/abpdiv!-=\"' &;\0\n")) | st.text(st.characters(exclude_categories=["Cs"])))
def test_no_page_raises_and_the_text_is_unicode(page: str) -> None:
    for settings in (MAIN, ALL):
        html_to_text(page, settings).text.encode()

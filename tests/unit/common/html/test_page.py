"""The frame of pages: values stay text, unseen characters are named, and the policy names the page's own style and script alone."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Environment

from common.html.page import UNKNOWN, or_unknown, render_page, template_environment
from tests.support.html_pages import Page

PAGE = """{% extends "page.jinja" %}
{% from "parts.jinja" import note, row, table %}
{% set title = "A title" %}
{% set introduction %}words{% endset %}
{% set first = note(value) %}
{% set listed %}{% call table([value]) %}{{ row([value], marked=true) }}{% endcall %}{% endset %}
{% set nothing %}
{% if false %}<p></p>{% endif %}
{% endset %}
{% set sections = [("Empty", nothing), ("A table, and more", listed)] %}
"""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("templates")
    (folder / "example.jinja").write_text(PAGE)
    (folder / "attribute.jinja").write_text(PAGE + """{% set first %}<p title="{{ value }}">{{ value }}</p>{% endset %}""")
    (folder / "picture.jinja").write_text(PAGE + """{% set first %}<svg><text>{{ value }}</text></svg>{% endset %}""")
    (folder / "missing.jinja").write_text(PAGE + "{% set first = value.name %}")
    return template_environment(folder, form=or_unknown("{:.1f}".format))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.one_of(st.sampled_from("<>&\"'/"), st.characters(exclude_categories=()))))
def test_a_value_comes_out_as_text_and_as_an_attribute(templates: Environment, words: str) -> None:
    page = render_page(templates, "attribute.jinja", value=words)
    parsed, plain = Page(page), Page(render_page(templates, "attribute.jinja", value=""))
    assert [tag for tag in parsed.tags if tag != "span"] == plain.tags
    [shown] = [value for name, value in parsed.attributes if name == "title"]
    assert shown is not None
    assert shown in "".join(parsed.texts)
    assert page.encode()
    if words.isprintable():
        assert shown == words


def test_markup_in_a_value_is_escaped_once(templates: Environment) -> None:
    page = render_page(templates, "example.jinja", value="<b>&amp;")
    assert '<tr class="marked"><td>&lt;b&gt;&amp;amp;</td></tr>' in page
    assert '<th scope="col">&lt;b&gt;&amp;amp;</th>' in page


def test_unseen_characters_are_named_and_set_off_in_text_but_not_in_a_picture(templates: Environment) -> None:
    text, picture = (render_page(templates, f"{name}.jinja", value="a\u202eb\ud800") for name in ("example", "picture"))
    assert 'a<span class="unseen">⟨U+202E⟩</span>b<span class="unseen">⟨U+D800⟩</span>' in text
    assert "<text>a⟨U+202E⟩b⟨U+D800⟩</text>" in picture, "an HTML element would end the picture"


def test_sections_without_content_are_left_out_and_links_lead_to_the_others(templates: Environment) -> None:
    page = render_page(templates, "example.jinja", value="")
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["A table, and more"]
    assert '<a href="#a-table-and-more">' in page
    assert '<section id="a-table-and-more">' in page


@pytest.mark.parametrize("script", [False, True])
def test_the_policy_names_the_digests_of_what_is_inlined(templates: Environment, script: bool) -> None:
    page = render_page(templates, "example.jinja", script=script, value="")
    [policy] = [value for _, value in Page(page).attributes if value and value.startswith("default-src 'none'; ")]
    inlined = {tag: re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script")}
    assert [len(found) for found in inlined.values()] == [1, int(script)]
    for tag, contents in inlined.items():
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert re.findall(rf"{tag}-src 'sha256-(.*?)'", policy) == digests
    assert "unsafe" not in policy


def test_a_name_that_does_not_exist_is_an_error_unless_a_filter_writes_a_dash(templates: Environment) -> None:
    with pytest.raises(LookupError, match=r"missing\.jinja: .*name"):
        render_page(templates, "missing.jinja", value={})
    dash = templates.from_string("{{ values.a|form }} {{ values.b|form }} {{ values.c|form }}")
    assert dash.render(values={"a": 2, "b": None}) == f"2.0 {UNKNOWN} {UNKNOWN}"


def test_no_template_of_the_program_switches_the_escaping_off() -> None:
    root = Path(__file__).parents[4]
    found = [path for package in ("common", "data_pipeline", "trainer") for path in (root / package).rglob("*.jinja")]
    assert len(found) >= 5
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert "|safe" not in text.replace(" ", ""), path
        assert "autoescape" not in text, path

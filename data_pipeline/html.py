"""HTML to text: the main content of a page, or everything that it shows.

Resiliparse builds the tree as a browser would and writes paragraphs, list items and table rows as lines. Titles, alternative texts,
link targets, forms and everything invisible stay out: a title mostly repeats the first heading. Pages in which no main content is
found are taken whole.

The tree costs time that grows with the square of the depth of elements and of the attributes of one element, and a list item is
indented by its depth: half a megabyte of `<div>` would take minutes. Pages beyond what any author writes are therefore only
stripped of their tags, by regular expressions that take linear time.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from resiliparse.extract.html2text import extract_plain_text

from data_pipeline.config import HtmlSettings

__all__ = ["Extracted", "html_to_text"]

_MAX_DEPTH = 256  # browsers stop at 512
_MAX_LIST_DEPTH = 32
_MAX_ATTRIBUTES = 255

# The states of the HTML standard's tokenizer (13.2.5.32 to 13.2.5.40) for one attribute and what stands before it.
_ATTRIBUTE = r"""[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s>"'][^\s>]*+)?+)?+"""
_TAGS_WITH_FEW_ATTRIBUTES = re.compile(
    rf"(?:[^<]++|<(?![a-zA-Z])|<[a-zA-Z][^\s/>]*+(?:{_ATTRIBUTE}){{0,{_MAX_ATTRIBUTES}}}+[\s/]*+(?:>|\Z))*+"
)
_TAG_NAME = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
_LISTS = frozenset(("ul", "ol"))
_VOID = ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
_CLOSED_BY_THE_NEXT = ("p", "li", "dt", "dd", "td", "th", "tr", "option")
_NEVER_NEST = frozenset((*_VOID, *_CLOSED_BY_THE_NEXT))
_INVISIBLE = re.compile(
    r"<(script|style|template|noscript|head|title|textarea|select)\b.*?(?:</\1\s*+>|\Z)|<!--.*?(?:-->|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_INLINE_TAG = re.compile(
    r"</?(?:a|abbr|b|bdi|bdo|cite|code|em|font|i|kbd|mark|q|s|small|span|strong|sub|sup|u|var)\b[^>]*+>?", re.IGNORECASE
)
_TAG = re.compile(r"<[a-zA-Z/!?][^>]*+>?")


@dataclass(frozen=True, slots=True)
class Extracted:
    """The text of a page, and how it was found."""

    text: str
    rule: str
    """`html-main`, `html-all` or `html-stripped`; counted in the report."""


def html_to_text(page: str, settings: HtmlSettings) -> Extracted:
    """The text that a page shows. Broken HTML is read as a browser reads it; nothing is ever raised."""
    if _is_pathological(page):
        return Extracted(_strip_tags(page), "html-stripped")
    if settings.extract == "main" and (text := _extract(page, main_content=True)).strip():
        return Extracted(text, "html-main")
    return Extracted(_extract(page, main_content=False), "html-all")


def _extract(page: str, main_content: bool) -> str:
    text: str = extract_plain_text(page, main_content=main_content, alt_texts=False)
    return text


def _is_pathological(page: str) -> bool:
    """Whether building the tree could take more than linear time."""
    few_attributes = _TAGS_WITH_FEW_ATTRIBUTES.match(page)
    assert few_attributes  # it matches the empty string
    return few_attributes.end() < len(page) or _is_deep(page)


def _is_deep(page: str) -> bool:
    depth = list_depth = 0
    for slash, name in _TAG_NAME.findall(page):
        tag = name.lower()
        if tag in _NEVER_NEST:
            continue
        step = -1 if slash else 1
        depth = max(depth + step, 0)
        if tag in _LISTS:
            list_depth = max(list_depth + step, 0)
        if depth > _MAX_DEPTH or list_depth > _MAX_LIST_DEPTH:
            return True
    return False


def _strip_tags(page: str) -> str:
    """What is left without tags, comments and what they hide; the tags of blocks end a line."""
    text = _INLINE_TAG.sub("", _INVISIBLE.sub("", page))
    lines = html.unescape(_TAG.sub("\n", text)).split("\n")
    return "\n".join(line for line in map(str.strip, lines) if line)

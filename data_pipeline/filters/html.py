"""HTML to text: the main content of a page, or everything that it shows if there is none.

Resiliparse builds the tree as a browser would. Titles, alternative texts, link targets, forms and invisible parts are left out.

Building the tree can take time that grows with the square of depth, attributes or length (each `<p>` after 240 unclosed `<font>`
holds 240 more elements). So pages that exceed what authors write are only stripped of their tags, in linear time. The parser runs
in a child process (`html_child`), limited by the length of the page; a page that exceeds this is stripped too. Ordinary pages take
4 to 60 bytes of memory per byte, and a page that consists of `<p>x` takes 144 (measured 2026-11).
"""

from __future__ import annotations

import html
import re
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import HtmlConfig, LimitConfig
from data_pipeline.execution.confined import ConfinedProgram, ProgramOnDemand, refuse_lower_limits

_CHILD = Path(__file__).with_name("html_child.py")
_SILENCE_S = 600.0  # wall time; the child's own limit is processor time, which a busy machine does not change
_MEMORY_BYTES = 64 << 20  # for any page; also the lower bound of limits.reader_memory_bytes
_MEMORY_PER_BYTE = 256
_SECONDS = 5  # an ordinary page takes milliseconds
_SECONDS_PER_MIB = 2
_KEPT_BYTES = 4 << 20  # after a larger page the child is replaced, because it does not return all of the memory
_RULES = {b"m": "html-main", b"a": "html-all"}
_ENDED_BY_THE_PAGE = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGXCPU)

_MAX_DEPTH = 256  # browsers stop at 512
_MAX_LIST_DEPTH = 32
_MAX_ATTRIBUTES = 255

# The states of the HTML standard's tokenizer (13.2.5.32 to 13.2.5.40) for one attribute and the characters before it.
_ATTRIBUTE = r"""[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s>"'][^\s>]*+)?+)?+"""
_TAGS_WITH_FEW_ATTRIBUTES = re.compile(
    rf"(?:[^<]++|<(?![a-zA-Z])|<[a-zA-Z][^\s/>]*+(?:{_ATTRIBUTE}){{0,{_MAX_ATTRIBUTES}}}+[\s/]*+(?:>|\Z))*+"
)
_TAG_NAME = re.compile(r"<(/?[a-zA-Z][^\s/>]*)")
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
    text: str
    rule: str  # `html-main`, `html-all` or `html-stripped`; counted in the report


class PageReader(ProgramOnDemand):
    """Converts pages. Its child process starts with the first one, in about 15 ms, and ends with `close`."""

    def __init__(self, limits: LimitConfig) -> None:
        super().__init__(_CHILD, _SILENCE_S)
        self._max_memory_bytes = limits.reader_memory_bytes

    def text_of(self, page: str, settings: HtmlConfig) -> Extracted:
        """Return the text that a page shows. Broken HTML is read as browsers read it; no page causes an error."""
        extracted = None if _is_pathological(page) else self._parsed(page.encode("utf-8", "surrogatepass"), settings)
        return extracted or Extracted(_strip_tags(page), "html-stripped")

    def _parsed(self, page: bytes, settings: HtmlConfig) -> Extracted | None:
        """Return the parser's text; None if parsing needs more memory or time than the length of the page allows."""
        memory_bytes = min(_MEMORY_BYTES + _MEMORY_PER_BYTE * len(page), self._max_memory_bytes)
        seconds = _SECONDS + _SECONDS_PER_MIB * (len(page) >> 20)
        mode = b"M" if settings.extract == "main" else b"A"

        def extract(program: ConfinedProgram) -> Extracted | None:
            program.write(struct.pack("<cqqq", mode, len(page), memory_bytes, seconds) + page)
            letter, length = struct.unpack("<cq", program.read(9))
            if letter not in _RULES or not 0 <= length <= memory_bytes:
                return None
            return Extracted(program.read(length).decode("utf-8", "surrogatepass"), _RULES[letter])

        extracted = self.ask(extract, "parses HTML", _ENDED_BY_THE_PAGE)
        if extracted is None:
            refuse_lower_limits(memory_bytes, seconds)
        elif len(page) > _KEPT_BYTES:
            self.close()
        return extracted


def _is_pathological(page: str) -> bool:
    few_attributes = _TAGS_WITH_FEW_ATTRIBUTES.match(page)
    assert few_attributes  # it matches the empty string
    if few_attributes.end() < len(page):
        return True
    depth = list_depth = 0
    tags = _TAG_NAME.findall(page)
    steps = {tag: _change_of_depth(tag) for tag in set(tags)}  # of this page alone: a name can be as long as a page
    for tag in tags:
        if not (step := steps[tag]):
            continue
        if step in (-2, 2):
            list_depth = max(list_depth + step // 2, 0)
            step //= 2
        depth = max(depth + step, 0)
        if depth > _MAX_DEPTH or list_depth > _MAX_LIST_DEPTH:
            return True
    return False


def _change_of_depth(tag: str) -> int:
    """1 for `div`, -1 for `/div`; 2 and -2 for lists; 0 for elements that never nest."""
    name = tag.removeprefix("/").lower()
    size = 0 if name in _NEVER_NEST else 2 if name in _LISTS else 1
    return -size if tag.startswith("/") else size


def _strip_tags(page: str) -> str:
    """Return the page without tags, comments and invisible elements. Tags other than inline tags end a line."""
    text = _INLINE_TAG.sub("", _INVISIBLE.sub("", page))
    lines = html.unescape(_TAG.sub("\n", text)).split("\n")
    return "\n".join(line for line in map(str.strip, lines) if line)

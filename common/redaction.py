"""Removes secrets from URLs, in all text that is printed or stored.

A URL can often be parsed in several ways, because passwords may hold `/`, `#`, `?`, `@` and `:`. A part is shown only if it is a
secret in none of these ways.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from common.terminal import printable

HIDDEN = "***"  # replaces the parts of a URL that could be a secret

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"
_LINK = re.compile(rf"::(?={_SCHEME}(?:://|::)|/)")
_URL = re.compile(rf"(?<![A-Za-z0-9+.-]){_SCHEME}+(?:::{_SCHEME}+)*+(?P<rest>://[^\s\"'<>`]*)?")
"""Without `rest` it is no URL. It is matched all the same, so that no character of it is read again."""
_STARTS_WITH_URL = re.compile(rf"(?:{_SCHEME}::)*{_SCHEME}://")
_BORDER = re.compile(r"[\s\"'<>`]")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^:\[\]]*)(?::\d{1,5})?")
_OPTIONS = re.compile(r"[;&][^/;&=]*=.*", re.DOTALL)
_FEWEST_CHARS = 4  # shorter words are not treated as secrets, because they occur inside many other words


def redacted(text: str) -> str:
    """Reduce each URL in a text to protocol, host and path. A text that begins with one is a URL up to its last `@`."""
    if "://" not in text:
        return text
    if _STARTS_WITH_URL.match(text) and not _BORDER.search(text.rpartition("@")[2]):
        return redacted_url(text)
    return _URL.sub(lambda match: redacted_url(match[0]) if match["rest"] else match[0], text)


def redacted_url(url: str) -> str:
    return "::".join(map(_bare, url_chain(url)))


def url_chain(url: str) -> list[str]:
    """Return the parts of a chained URL such as `simplecache::https://host/file`."""
    return _LINK.split(url)


def redacted_repr(value: Any) -> str:
    return repr(_with_texts(value, redacted))


def redacted_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that may be stored: strings that are URLs are redacted at any depth; others, such as prompts, stay."""

    def address(text: str) -> str:
        return redacted_url(text) if _STARTS_WITH_URL.match(text) else text

    return {name: _with_texts(value, address) for name, value in values.items()}


def secrets_of(url: str) -> list[str]:
    """Return what `redacted` removes, in all encodings, the longest first: a service's errors quote parts of its URL."""
    found: set[str] = set()
    for part in url_chain(url):
        rest = part.partition("://")[2]
        user = rest.rpartition("@")[0]
        secret = user.partition(":")[2] or user
        _, *options = re.split(r"[?#&;]", rest)
        values = (option.partition("=")[2] or option for option in options)
        found |= {user, secret, *(piece for whole in (secret, *values) for piece in (whole, *re.split(r"[:/@?#&;=]", whole)))}
    encoded = {form(piece) for piece in found for form in (str, quote, quote_plus, unquote, unquote_plus)}
    shown = redacted_url(url)
    return sorted((piece for piece in encoded if len(piece) >= _FEWEST_CHARS and piece not in shown), key=len, reverse=True)


def without(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return redacted(text)


class RedactingFormatter(logging.Formatter):
    def __init__(self, form: str = "%(message)s", secrets: Iterable[str] = ()) -> None:
        super().__init__(form)
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return printable(without(super().format(record), self._secrets))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_texts(one, change) for name, one in value.items()}
    return [_with_texts(one, change) for one in value] if isinstance(value, list | tuple) else value


def _bare(url: str) -> str:
    protocol, is_url, rest = url.partition("://")
    if not is_url:
        return url if re.fullmatch(_SCHEME, url) or "@" not in url else HIDDEN
    hidden = f"{protocol}://{HIDDEN}"
    authority = re.split(r"[/?#]", rest.lstrip("/"), maxsplit=1)[0]
    if "@" in rest and (":" in authority or "@" in authority or "://" in rest):
        user, _, rest = rest.rpartition("@")
        if re.search(r"[?#;&=]", user) and ("@" in user or "@" in authority or _HOST.fullmatch(authority)):
            return hidden  # the last @ ends a password with one of these characters, or it is part of a query or an option
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if not _HOST.fullmatch(authority):
        return hidden
    rest = rest.partition("?")[0]
    if protocol.startswith("http"):
        rest = rest.partition("#")[0]
    return f"{protocol}://{_OPTIONS.sub('', rest)}"

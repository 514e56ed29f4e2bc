"""Addresses without their secrets, for everything that is printed or stored.

A URL can hold a password in front of its host, keys in its query or its options, and other URLs, joined by `::`. People put
characters into passwords that have a meaning in a URL (`/`, `#`, `?`, `@`, `:`), so an address can often be read in several ways.
What is shown here is a secret in none of these readings. Where they have nothing in common, only the protocol is left.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from common.terminal import printable

__all__ = [
    "HIDDEN",
    "RedactingFormatter",
    "redacted",
    "redacted_repr",
    "redacted_settings",
    "redacted_url",
    "secrets_of",
    "url_chain",
    "without",
]

HIDDEN = "***"
"""Stands for the part of an address that could be a secret."""

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"
_LINK = re.compile(rf"::(?={_SCHEME}(?:://|::)|/)")
_URL = re.compile(rf"(?:(?<![A-Za-z0-9+.-]){_SCHEME}::)*(?<![A-Za-z0-9+.-]){_SCHEME}://[^\s\"'<>`]*")
_STARTS_WITH_URL = re.compile(rf"(?:{_SCHEME}::)*{_SCHEME}://")
_BORDER = re.compile(r"[\s\"'<>`]")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^:\[\]]*)(?::\d{1,5})?")
_OPTIONS = re.compile(r"[;&][^/;&=]*=.*", re.DOTALL)
_FEWEST_CHARS = 4
"""Shorter words are not treated as secrets, because they occur inside many other words."""


def redacted(text: str) -> str:
    """`text`, with each URL in it reduced to protocol, host and path.

    A text that begins with a URL is one URL to its end if there is no white space or quotation mark after its last `@`: a password
    can hold those too.
    """
    if "://" not in text:
        return text
    if _STARTS_WITH_URL.match(text) and not _BORDER.search(text.rpartition("@")[2]):
        return redacted_url(text)
    return _URL.sub(lambda match: redacted_url(match.group()), text)


def redacted_url(url: str) -> str:
    """A URL, or several joined by `::`, without user, password, query, fragment and options."""
    return "::".join(map(_bare, url_chain(url)))


def url_chain(url: str) -> list[str]:
    """The parts of a chained URL such as `simplecache::https://host/file`; one part where nothing is chained."""
    return _LINK.split(url)


def redacted_repr(value: Any) -> str:
    """`repr` of a setting's value for a message, with the texts in it redacted."""
    return repr(_with_texts(value, redacted))


def redacted_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they may be stored: texts that are URLs are redacted, at any depth; other texts, such as prompts, stay."""
    return {name: _with_texts(value, _redacted_address) for name, value in values.items()}


def secrets_of(url: str) -> list[str]:
    """Every part of a URL that `redacted` leaves out, as it is and in other encodings, the longest first.

    The error texts of a service quote pieces of its address; `without` takes these out.
    """
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
    """`text` with `HIDDEN` in place of each secret, and its URLs redacted."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return redacted(text)


class RedactingFormatter(logging.Formatter):
    """Writes log messages without the secrets of the URLs in them, and without characters that steer a terminal.

    Args:
        form: as for `logging.Formatter`.
        secrets: what is left out besides, as `secrets_of` gives it: libraries log pieces of the addresses that they were given.
    """

    def __init__(self, form: str = "%(message)s", secrets: Iterable[str] = ()) -> None:
        super().__init__(form)
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """The line of a log record."""
        return printable(without(super().format(record), self._secrets))


def _redacted_address(text: str) -> str:
    return redacted_url(text) if _STARTS_WITH_URL.match(text) else text


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_texts(one, change) for name, one in value.items()}
    return [_with_texts(one, change) for one in value] if isinstance(value, list | tuple) else value


def _bare(url: str) -> str:
    """One URL of a chain: `protocol://host/path`."""
    protocol, is_url, rest = url.partition("://")
    if not is_url:
        return url if re.fullmatch(_SCHEME, url) or "@" not in url else HIDDEN
    hidden = f"{protocol}://{HIDDEN}"
    authority = re.split(r"[/?#]", rest.lstrip("/"), maxsplit=1)[0]
    if "@" in rest and (":" in authority or "@" in authority or "://" in rest):
        user, _, rest = rest.rpartition("@")
        if re.search(r"[?#;&=]", user) and ("@" in user or "@" in authority or _HOST.fullmatch(authority)):
            return hidden  # the last @ ends a password with such a sign, or it is in a query or an option
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if not _HOST.fullmatch(authority):
        return hidden
    rest = rest.partition("?")[0]
    if protocol.startswith("http"):
        rest = rest.partition("#")[0]
    return f"{protocol}://{_OPTIONS.sub('', rest)}"

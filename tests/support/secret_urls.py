"""URLs with secrets in every part that can hold one, for tests that search output for them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

_SIGNS = "/#@:?%&=;+$!,.~-_*()[]|\\^{}"
_PROTOCOLS = ("s3", "gs", "http", "https", "hf", "ftp", "memory", "sftp")


@dataclass(frozen=True)
class SecretUrl:
    """A URL, and the secrets in it that must not be shown."""

    url: str
    secrets: tuple[str, ...]

    def seen_in(self, text: str) -> list[str]:
        """Return the secrets that a text contains."""
        return [secret for secret in self.secrets if secret in text]


@st.composite
def secret_urls(draw: st.DrawFn, signs: str = _SIGNS, protocols: tuple[str, ...] = _PROTOCOLS) -> SecretUrl:
    """Draw a URL with optional user, password, query, options and fragment, alone or at the end of a chain of URLs."""
    secrets: list[str] = []

    def secret() -> str:
        # Both halves are secrets: a reader who knows one half could guess the other.
        halves = [f"canary{draw(st.integers(1000, 9999))}{len(secrets) + number}" for number in (0, 1)]
        secrets.extend(halves)
        return draw(st.text(st.sampled_from(signs), max_size=3)).join(halves)

    protocol = draw(st.sampled_from(protocols))
    place = draw(st.sampled_from(["host", "host:8080", "bucket", "user.example.org"]))
    path = draw(st.sampled_from(["", "/", "/a.txt", "/dir/a.txt", "/dir/*.txt"]))
    user = draw(st.sampled_from(["", "user:", "AKIAXX:", "me@example.org:"]))
    authority = f"{user}{secret()}@{place}" if user else place
    query = ""
    if draw(st.booleans()):
        query += f"?token={secret()}"
    if draw(st.booleans()):
        query += f"{'&' if query else '?'}{draw(st.sampled_from(['key', 'X-Amz-Signature', 'secret', 'versionId']))}={secret()}"
    if query and protocol in ("http", "https") and draw(st.booleans()):
        query += f"#access_token={secret()}"
    if not query and protocol in ("http", "https", "ftp") and draw(st.booleans()):
        path += f";secret={secret()}"
    chain = draw(st.sampled_from(["", "", "", "simplecache::", "filecache::", "zip://*.txt::", "zip://a/b.txt::simplecache::"]))
    return SecretUrl(f"{chain}{protocol}://{authority}{path}{query}", tuple(secrets))

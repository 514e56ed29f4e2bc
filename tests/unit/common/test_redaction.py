import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.redaction import RedactingFormatter, redacted, redacted_settings, redacted_url, secrets_of, without
from tests.support.secret_urls import SecretUrl, secret_urls


@given(secret_urls())
@example(SecretUrl("https://user:canary1@b?canary2@host/x", ("canary1", "canary2")))
@example(SecretUrl("https://user:canary1::zip://canary2@host/x", ("canary1", "canary2")))
@example(SecretUrl("https://proxy/http://user:canary1@host/x", ("canary1",)))
@example(SecretUrl("https://host/x?mail=a@b&token=canary1", ("canary1",)))
@example(SecretUrl("https://canary1@host/x", ("canary1",)))
@example(SecretUrl("https://user:canary1", ("canary1",)))
def test_nothing_secret_of_an_address_is_shown(secret: SecretUrl) -> None:
    assert not secret.seen_in(redacted_url(secret.url))
    assert not secret.seen_in(redacted(secret.url))
    assert redacted_url(redacted_url(secret.url)) == redacted_url(secret.url)


@given(
    secret_urls(), st.sampled_from(["{}", "error: {}: not there", "source '{}' and \"{}\"", "({})", 'sources = ["{}"]', "x={}, y"])
)
def test_nothing_secret_of_an_address_is_shown_wherever_it_stands_in_a_text(secret: SecretUrl, form: str) -> None:
    assert not secret.seen_in(redacted(form.format(secret.url, secret.url)))


@given(secret_urls())
def test_pieces_that_a_library_quotes_are_known(secret: SecretUrl) -> None:
    rest = secret.url.partition("://")[2]
    text = f"HTTPSConnectionPool: Max retries exceeded with url: {rest}"
    assert not secret.seen_in(without(text, secrets_of(secret.url)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:hunter2@bucket/a/b.txt?versionId=hunter2", "s3://bucket/a/b.txt"),
        ("https://me:hunter2@host:80/a/b.txt?token=hunter2&x=y/z#hunter2", "https://host:80/a/b.txt"),
        ("https://host/a@b.txt", "https://host/a@b.txt"),
        ("hf://datasets/me/books@main/a.parquet", "hf://datasets/me/books@main/a.parquet"),
        ("s3://bucket/a#1.txt", "s3://bucket/a#1.txt"),
        ("http://[::1]:8000/x", "http://[::1]:8000/x"),
        ("https://u:pa/ss@host/x", "https://host/x"),
        ("https://u:pa#ss@host/x", "https://host/x"),
        ("https://u:pa ss@host/x", "https://host/x"),
        ("https://u:80?ss@host/x", "https://***"),
        ("simplecache::https://u:p@host/x?k=v", "simplecache::https://host/x"),
        ("zip://*.txt::s3://K:S@bucket/a.zip", "zip://*.txt::s3://bucket/a.zip"),
        ("see https://u:p@host/x: gone, 'https://h/?t=1'", "see https://host/x: gone, 'https://h/'"),
        ("sqlite:////data/runs.db", "sqlite:////data/runs.db"),
        ("file:///data/runs", "file:///data/runs"),
        ("/data/a@b?c.txt", "/data/a@b?c.txt"),
        ("no address: at all @ ? #", "no address: at all @ ? #"),
    ],
)
def test_what_is_no_secret_stays(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_settings_are_redacted_at_any_depth() -> None:
    settings = {
        "log": {"uri": "https://u:p@h", "steps": 3},
        "paths": ["/a", "s3://k:s@b/x"],
        "none": None,
        "prompt": "see s3://k:s@b",
    }
    assert redacted_settings(settings) == {
        "log": {"uri": "https://h", "steps": 3},
        "paths": ["/a", "s3://b/x"],
        "none": None,
        "prompt": "see s3://k:s@b",
    }


def test_log_lines_are_redacted_with_their_tracebacks() -> None:
    formatter = RedactingFormatter("%(levelname)s: %(message)s", secrets_of("https://h?token=hunter2"))
    try:
        raise OSError("https://me:hunter3@host/x")
    except OSError as error:
        record = logging.LogRecord("a", logging.WARNING, "a.py", 1, "/?token=%s", ("hunter2",), (OSError, error, None))
    assert formatter.format(record) == "WARNING: /?token=***\nOSError: https://host/x"

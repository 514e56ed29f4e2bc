import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from common.errors import SourceError
from data_pipeline.config import LimitConfig, PrepareConfig
from data_pipeline.documents import Document
from data_pipeline.sources.hosts import is_public, may_redirect
from data_pipeline.sources.inputs import Part, find_inputs
from data_pipeline.sources.readers import read_part
from data_pipeline.sources.storage import list_files

TEXT = b"Only machines of this network may read this."


@dataclass
class Site:
    """A web server on the loopback interface that answers with fixed text or a redirect, and records the requests."""

    port: int = 0
    redirect: str = ""
    asked: list[str] = field(default_factory=list)

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}"


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            if site.redirect and ".txt" in self.path:
                self.send_response(302)
                self.send_header("Location", site.redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(TEXT)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(TEXT)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def inside() -> Iterator[Site]:
    with serving(Site()) as site:
        yield site


@pytest.fixture
def outside(inside: Site) -> Iterator[Site]:
    """Redirects its `.txt` to the other server."""
    with serving(Site(redirect=f"{inside.url()}/secret")) as site:
        yield site


def texts(url: str, **limits: Any) -> list[str]:
    config = PrepareConfig(sources=(url,), limits={"retries": 0, **limits})
    files = find_inputs(config, Path("/nowhere"))
    items = [item for file in files for item in read_part(Part(file, 0, file.bytes), config)]
    return [item.text for item in items if isinstance(item, Document)]


@pytest.mark.parametrize("chain", ["", "simplecache::", "filecache::", "blockcache::", "simplecache::filecache::"])
def test_a_redirect_to_another_host_is_refused_and_not_followed(inside: Site, outside: Site, chain: str) -> None:
    with pytest.raises(SourceError, match=r"redirects to another host, http://127\.0\.0\.1:\d+; if .*limits\.allowed_hosts"):
        texts(f"{chain}{outside.url()}/a.txt")
    assert outside.asked
    assert not inside.asked


def test_a_redirect_inside_an_archive_address_is_refused(inside: Site, outside: Site) -> None:
    with pytest.raises(SourceError, match="redirects to another host"):
        texts(f"zip://*.txt::{outside.url()}/a.txt")
    assert not inside.asked


def test_a_setting_allows_redirects_to_a_host(inside: Site, outside: Site) -> None:
    for pattern in ("127.0.0.1", "127.*", "*"):
        assert texts(f"{outside.url()}/a.txt", allowed_hosts=(pattern,)) == [TEXT.decode()]
    with pytest.raises(SourceError, match="redirects to another host"):
        texts(f"{outside.url()}/a.txt", allowed_hosts=("10.*", "localhost"))


def test_redirects_that_stay_on_the_host_are_followed(outside: Site) -> None:
    for target in (f"{outside.url()}/secret", "/secret"):
        outside.redirect = target
        assert texts(f"{outside.url()}/a.txt") == [TEXT.decode()]


@pytest.mark.parametrize("target", ["http://[::1", "//other.example/x", "http://localhost:1/x", "https://other.example/"])
def test_odd_and_foreign_targets_are_refused(outside: Site, target: str) -> None:
    outside.redirect = target
    with pytest.raises(SourceError, match="redirects to"):
        texts(f"{outside.url()}/a.txt")


def test_a_message_about_a_redirect_holds_no_secrets(outside: Site) -> None:
    outside.redirect = "http://you:hunter3@other.example/x?token=hunter4"
    with pytest.raises(SourceError) as caught:
        texts(f"http://me:hunter2@127.0.0.1:{outside.port}/a.txt?key=hunter5")
    assert "http://other.example" in str(caught.value)
    assert "hunter" not in str(caught.value)


def answering(address: str) -> Any:
    async def resolve(_self: object, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        return [{"hostname": host, "host": address, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    return resolve


def test_a_public_name_that_leads_to_a_private_address_is_refused(inside: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp.DefaultResolver, "resolve", answering("127.0.0.1"))
    url = f"{inside.url('text.example.org')}/a"
    for chain in ("", "simplecache::"):
        with pytest.raises(
            SourceError, match=r"text\.example\.org: this name resolves to 127\.0\.0\.1, which is not a public address; "
        ):
            list_files(f"{chain}{url}", LimitConfig(retries=0))
    assert not inside.asked
    allowed = LimitConfig(retries=0, allowed_hosts=("*.example.org",))
    assert [file.bytes for file in list_files(url, allowed).files] == [len(TEXT)]


def test_addresses_and_local_names_that_the_user_names_are_read(inside: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp.DefaultResolver, "resolve", answering("127.0.0.1"))
    for host in ("127.0.0.1", "localhost", "intranet", "files.localhost"):
        assert [file.bytes for file in list_files(f"{inside.url(host)}/a", LimitConfig(retries=0)).files] == [len(TEXT)]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "192.168.0.1",
            "172.16.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "240.0.0.1",
        ),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "ff02::1"),
    ],
)
def test_addresses_of_private_networks_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101", "::ffff:8.8.8.8"])
def test_other_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("start", "target", "stays"),
    [
        ("http://a/x", "http://a/y", True),
        ("http://a/x", "https://a/y", True),
        ("http://a:80/x", "https://a:443/y", True),
        ("http://a:8080/x", "https://a:8080/y", True),
        ("https://a/x", "http://a/y", False),
        ("http://a/x", "http://a:8080/y", False),
        ("http://a/x", "http://b/x", False),
        ("http://a/x", "http://a.b/x", False),
        ("http://a/x", "file:///etc/passwd", False),
    ],
)
def test_a_redirect_stays_on_the_host(start: str, target: str, stays: bool) -> None:
    assert may_redirect(URL(start), URL(target)) is stays


@pytest.mark.parametrize(
    "url", ["reference::http://127.0.0.1:1/a.json", "simplecache::reference::http://127.0.0.1:1/a", "generic://a"]
)
def test_stores_whose_files_name_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(SourceError, match="name other addresses to read; name those addresses instead"):
        list_files(url, LimitConfig(retries=0))


@pytest.mark.parametrize(
    "form", ["local://{}", "simplecache::file://{}", "dir::file://{}", "simplecache::local://{}", "dir://{}::file:///"]
)
def test_no_detour_to_the_files_of_this_machine_gets_around_the_check_of_links(tmp_path: Path, form: str) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "deep").symlink_to("/etc")
    with pytest.raises(SourceError, match="a local file must be named by its path alone"):
        list_files(form.format(tmp_path / "text"), LimitConfig(retries=0))

"""A headless Chromium without access to other machines, two small real runs, and a folder for the screenshots."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, tiny_config
from trainer.loop import train

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
NAMES = ("slow", "fast")
PROMPT = "the cat"
Opener = Callable[..., Any]


@dataclass
class Seen:
    """The errors and requests of a page while it was open."""

    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Requests to other machines. They are blocked."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: env/make-venv .venv dev")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium), or CHROMIUM does not name one")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Browser) -> Opener:
    """A context manager that opens a page at an address. It yields the page, and its errors and requests."""

    @contextmanager
    def open_page(address: str, **options: Any) -> Iterator[tuple[Page, Seen]]:
        seen = Seen()
        page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)

        def decide(route: Route) -> None:
            where = urlsplit(route.request.url)
            if where.scheme in ("file", "data", "blob") or where.hostname in ("127.0.0.1", "localhost"):
                route.continue_()
            else:
                seen.outside.append(route.request.url)
                route.abort()

        page.route("**/*", decide)
        page.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.goto(address)
        yield page, seen
        page.close()

    return open_page


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for screenshots: SCREENSHOTS, or a temporary folder of pytest."""
    folder = Path(os.environ["SCREENSHOTS"]) if "SCREENSHOTS" in os.environ else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def runs(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two training runs on the same data with different learning rates."""
    data, folder = write_prepared(tmp_path_factory.mktemp("data")), tmp_path_factory.mktemp("runs")
    for name, rate in zip(NAMES, (1e-3, 6e-3), strict=True):
        settings = {"optim": {"lr": rate}, "eval": {"prompt": PROMPT}, "log": {"every_steps": 1}}
        train(tiny_config(data, folder / name, **settings))
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def tensorboard(runs: dict[str, Path]) -> Iterator[str]:
    """The address of TensorBoard, started as the container starts it."""
    environment = os.environ | {"PYTHON": sys.executable, "TENSORBOARD_LOGDIR": str(runs[NAMES[0]].parent)}
    command = [str(ROOT / "entrypoints" / "tensorboard"), "--port", "0"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = (re.search(r"TensorBoard \S+ at http://\S*:(\d+)", line) for line in server.stderr)
            port = next((found[1] for found in lines if found), None)
            assert port, "TensorBoard did not start"
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()

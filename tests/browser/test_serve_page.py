"""The page of `trainer serve` in a real browser: it writes texts as they come, stops, asks for a token, and shows text as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Opener
from tests.support.served import TEMPLATE, served, small_model
from trainer.inference.text_model import TextModel

SECRET = "0123456789abcdef-of-a-test"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return small_model()


def test_a_conversation_goes_on_with_what_was_said(model: TextModel, opened: Opener, artefacts: Path) -> None:
    with served(model, template=TEMPLATE) as client, opened(f"http://127.0.0.1:{client.port}/") as (page, seen):
        page.fill("#seed", "3")
        page.fill("#max_tokens", "4")
        messages = []
        for number, content in enumerate(("a", "<b>")):
            messages.append({"role": "user", "content": content})
            answer = client.ask("/v1/chat/completions", {"messages": messages, "seed": 3, "max_tokens": 4})[1]
            messages.append(answer["choices"][0]["message"])
            page.fill("#prompt", content)
            page.press("#prompt", "Enter")
            page.locator("#log figure").nth(2 * number + 1).wait_for()
            page.locator("#send:enabled").wait_for()
        shown = [
            text.removesuffix("\n") for text in page.locator("#log pre").evaluate_all("all => all.map(one => one.textContent)")
        ]
        assert shown == [message["content"].removesuffix("\n") for message in messages]
        assert page.locator("#count").inner_text() == "4"
        page.screenshot(path=artefacts / "serve.png", full_page=True)
        assert (seen.errors, seen.outside) == ([], [])


def test_the_page_asks_for_the_token_and_stops_a_text(model: TextModel, opened: Opener) -> None:
    with served(model, token=SECRET) as client, opened(f"http://127.0.0.1:{client.port}/") as (page, seen):
        page.fill("#token", "wrong")
        page.click("#login button")
        page.locator("#problem:visible").wait_for()
        assert "no valid token" in page.locator("#problem").inner_text()
        page.fill("#token", SECRET)
        page.click("#login button")
        page.fill("#max_tokens", "100000")
        page.fill("#prompt", "<img src=x onerror=alert(1)>")
        page.click("#send")
        while len(page.locator("#log pre").inner_text()) < 40:
            pass
        assert client.num_texts() == 1
        page.click("#stop")
        page.locator("#send:enabled").wait_for()
        client.wait_until_idle()
        assert page.locator("#log img").count() == 0
        assert page.locator("#problem").is_hidden()
        assert all("401" in error for error in seen.errors)
        assert seen.outside == []


def test_an_error_is_shown_and_the_message_stays(model: TextModel, opened: Opener) -> None:
    with served(model, template=TEMPLATE) as client, opened(f"http://127.0.0.1:{client.port}/") as (page, _):
        page.fill("#prompt", "too long " * 40)
        page.press("#prompt", "Enter")
        page.locator("#problem:visible").wait_for()
        assert "the model sees at most 64; shorten it" in page.locator("#problem").inner_text()
        assert page.locator("#prompt").input_value().startswith("too long")


def test_a_page_of_another_site_reads_nothing_and_starts_nothing(model: TextModel, opened: Opener) -> None:
    calls = """async (address) => {
        const found = [], body = '{"prompt": "a"}';
        for (const options of [{}, {mode: "no-cors"}, {method: "POST", headers: {"Content-Type": "application/json"}, body}]) {
            try { found.push((await fetch(address, options)).type + " " + (await (await fetch(address, options)).text())); }
            catch (error) { found.push(error.name); }
        }
        try { await fetch(address, {method: "POST", mode: "no-cors", body}); } catch {}
        return found;
    }"""
    with served(model) as client, served(model) as other, opened(f"http://127.0.0.1:{other.port}/") as (page, _):
        found = page.evaluate(calls, f"http://127.0.0.1:{client.port}/v1/completions")
        assert found == ["TypeError", "TypeError", "TypeError"]
        assert client.num_texts() == 0

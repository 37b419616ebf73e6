"""A headless Chromium for tests of the page (Playwright's own, or an installed one; None if there is none), and its page."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Route, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser | None]:
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        program = own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            yield None
            return
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to be root in one
        browser = playwright.chromium.launch(executable_path=program, args=sandbox)
        try:
            yield browser
        finally:
            browser.close()


def opened(browser: Browser, url: str, **options) -> Iterator[Page]:
    """The page; that nothing was forbidden, and no script has failed, is checked at the end."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if "Content Security" in message.text else None)
    foreign: list[str] = []
    page.on(
        "request", lambda request: None if request.url.startswith(url.removesuffix("/docs")) else foreign.append(request.url)
    )
    page.goto(url)
    yield page
    context.close()
    assert (complaints, foreign) == ([], [])


def sent(page: Page, chunks: list[dict]) -> list[dict]:
    """Answer chats with these chunks, one list for each; what they ask for is put into the list that is returned."""
    bodies: list[dict] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks[len(bodies) - 1])
        route.fulfill(content_type="text/event-stream", body=events + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    return bodies


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def delta(finish_reason=None, **fields) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}

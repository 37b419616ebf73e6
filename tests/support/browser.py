"""A headless Chromium for tests of the page: Playwright's own, or an installed one; None if there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

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

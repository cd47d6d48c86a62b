"""A real browser for tests of pages: Debian's Chromium, started once in a session, driven by Playwright.

Playwright keeps an event loop going in the thread that uses it, which other tests could not bear: each module has a
connection of its own to the one browser, and ends it.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
_QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--remote-debugging-address=127.0.0.1", "--force-color-profile=srgb"),
]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory) -> Iterator[str]:
    """The address of a browser that runs until the tests end."""
    if not Path(CHROMIUM).exists():
        pytest.skip("Chromium is not installed: scripts/test-packages installs it")
    profile = tmp_path_factory.mktemp("chromium")
    process = subprocess.Popen(
        [CHROMIUM, *_QUIET, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        found = next((re.search(r"ws://\S+", line) for line in process.stderr if "DevTools listening" in line), None)
        assert found is not None, "Chromium has ended before it listened"
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator:
    """A connection to the browser."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright_api.sync_playwright() as playwright:
        connected = playwright.chromium.connect_over_cdp(chromium)
        yield connected
        connected.close()


@pytest.fixture
def open_page(browser) -> Iterator:
    """Opens a file in a new window of a size and theme; the test fails if the page has reported an error."""
    contexts, errors = [], []

    def opened(path: Path | str, *, width: int = 1400, height: int = 900, dark: bool = False):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        # A file asks for nothing; a page of a server of ours asks that server alone.
        own = path if isinstance(path, str) else "file:"
        page.on(
            "request", lambda request: None if request.url.startswith((own, "data:")) else errors.append(request.url)
        )
        page.goto(path.resolve().as_uri() if isinstance(path, Path) else path)
        page.bring_to_front()  # a page behind others draws nothing
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []

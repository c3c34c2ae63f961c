"""The live page in a real browser, which reaches nothing but the server under test.

What should not happen is kept, to be looked at in the end: requests to other hosts, errors on the console (a violated
content security policy is one), exceptions. Screenshots go to the folder that ROOST_SCREENSHOTS names.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.server_process import PATIENCE_S, wait_until

SHOTS = Path(os.environ.get("ROOST_SCREENSHOTS", Path(__file__).parents[1] / "artifacts"))
ONLY_HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
NETWORK = "Failed to load resource"  # how the console begins to say that a request was refused, or not answered


def launch() -> tuple[Any, Any]:
    """Playwright and a browser; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    playwright = sync_api.sync_playwright().start()
    return playwright, playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", ONLY_HERE])


class LivePage:
    """The page of one server, as one person sees it."""

    def __init__(self, browser: Any, url: str, *, width: int = 1280, scheme: str = "light") -> None:
        self.problems: list[str] = []
        self._host = urlsplit(url).netloc
        self._context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self._context.set_default_timeout(PATIENCE_S * 1000)
        self.page = self._context.new_page()
        self.page.on("request", lambda request: self._check_host(request.url))
        self.page.on("console", lambda message: self._check_console(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.goto(f"{url}/live")

    def state(self) -> dict[str, Any]:
        """What the page has understood."""
        state: dict[str, Any] = self.page.evaluate("window.roostLive ? roostLive.state() : {status: ''}")
        return state

    def until(self, check: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The first state for which something holds; there is no limit on how soon, only on patience."""

        def found() -> dict[str, Any] | None:
            state = self.state()
            return state if state["status"] and check(state) else None

        state = wait_until(found)
        assert state is not None
        return state

    def is_live(self) -> "LivePage":
        """Wait until it shows the engine."""
        self.until(lambda state: state["status"] == "ok" and state["pools"])
        return self

    def text(self, selector: str) -> str:
        """What a part of the page says."""
        said: str = self.page.inner_text(selector)
        return said

    def say(self, text: str) -> None:
        """Send a message of the chat that is shown."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def shot(self, name: str) -> None:
        """Keep what it looks like."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"live_{name}.png", full_page=True)

    def close(self, *, allowed: str = "nothing") -> None:
        """Leave; nothing must have happened that should not, but for what begins with `allowed`."""
        self._context.close()
        assert [problem for problem in self.problems if not problem.startswith(allowed)] == []

    def _check_host(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._host:
            self.problems.append(f"request to {url}")

    def _check_console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)

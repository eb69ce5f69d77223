"""Playwright drives Chromium on the event loop of another thread, so that tests call plain functions.

The asynchronous API is used because the synchronous one leaves its loop running in the thread of the tests, where
pytest-asyncio starts its own. Chromium is the system's: Playwright downloads no browser unless it is told to.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright import async_api

from tests.end_to_end.page.page_object import PATIENCE, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
FORGET = "() => { sessionStorage.clear(); localStorage.clear(); }"


@dataclass(frozen=True)
class Looks:
    """How large a tab is, and whether its reader likes the dark; it behaves as a telephone's when it is narrow."""

    width: int = 1280
    height: int = 900
    dark: bool = False

    def options(self) -> dict[str, Any]:
        return {
            "viewport": {"width": self.width, "height": self.height},
            "is_mobile": self.width < 500,
            "color_scheme": "dark" if self.dark else "light",
        }


class Chromium:
    """Tabs are used again, since a new one takes twice as long as all that most tests do in it."""

    def __init__(self, portal: BlockingPortal, browser: async_api.Browser) -> None:
        self._portal = portal
        self._browser = browser
        self._idle: dict[Looks, list[async_api.Page]] = {}

    @contextmanager
    def opened_page(self, **looks: Any) -> Iterator[Page]:
        """Opens a tab that knows nothing of others, and empties it at the end."""
        wanted = Looks(**looks)
        idle = self._idle.setdefault(wanted, [])
        tab = idle.pop() if idle else self._new_tab(wanted)
        devtools = self._portal.call(tab.context.new_cdp_session, tab)
        yield Page(self._portal, tab, devtools)
        with suppress(async_api.Error):
            self._portal.call(self._empty, tab, devtools)
            idle.append(tab)
            return
        self._portal.call(tab.context.close)

    def _new_tab(self, looks: Looks) -> async_api.Page:
        context = self._portal.call(partial(self._browser.new_context, **looks.options()))
        context.set_default_timeout(1000 * PATIENCE)
        tab: async_api.Page = self._portal.call(context.new_page)
        return tab

    @staticmethod
    async def _empty(tab: async_api.Page, devtools: async_api.CDPSession) -> None:
        await tab.evaluate(FORGET)
        await devtools.detach()  # with what it has told the tab about its size
        await tab.mouse.move(0, 0)
        await tab.emulate_media(reduced_motion="null")
        await tab.goto("about:blank")
        await tab.context.clear_cookies()


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_chromium(binary: str) -> Iterator[Chromium]:
    """Starts a browser with an empty profile that resolves no host name."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(async_api.async_playwright()) as driver:
        launch = partial(driver.chromium.launch, executable_path=binary, args=FLAGS)
        with portal.wrap_async_context_manager(portal.call(launch)) as browser:
            yield Chromium(portal, browser)

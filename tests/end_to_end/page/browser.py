"""Playwright drives Chromium on the event loop of another thread, so that tests call plain functions.

The asynchronous API is used because the synchronous one leaves its loop running in the thread of the tests, where
pytest-asyncio starts its own. Chromium is the system's: Playwright downloads no browser unless it is told to.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright import async_api

from tests.end_to_end.page.page_object import PATIENCE, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")


class Chromium:
    def __init__(self, portal: BlockingPortal, browser: async_api.Browser) -> None:
        self._portal = portal
        self._browser = browser

    @contextmanager
    def opened_page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """Opens a tab, which behaves as a telephone's when it is narrow, and closes it at the end."""
        new_context = partial(
            self._browser.new_context,
            viewport={"width": width, "height": height},
            is_mobile=width < 500,
            color_scheme="dark" if dark else "light",
        )
        with self._portal.wrap_async_context_manager(self._portal.call(new_context)) as context:
            context.set_default_timeout(1000 * PATIENCE)
            page = self._portal.call(context.new_page)
            yield Page(self._portal, page, self._portal.call(context.new_cdp_session, page))


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_chromium(binary: str) -> Iterator[Chromium]:
    """Starts a browser with an empty profile that resolves no host name."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(async_api.async_playwright()) as driver:
        launch = partial(driver.chromium.launch, executable_path=binary, args=FLAGS)
        with portal.wrap_async_context_manager(portal.call(launch)) as browser:
            yield Chromium(portal, browser)

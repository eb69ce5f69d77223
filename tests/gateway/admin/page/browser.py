"""Chromium, driven by Playwright on the event loop of a thread, so that tests call it as plain functions.

The asynchronous API is used because the synchronous one leaves its loop running in the thread of the tests, where
pytest-asyncio starts its own. Chromium is the system's: Playwright downloads no browser unless it is told to.
"""

import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright import async_api

PATIENCE = 240.0  # seconds until something that must happen counts as not happening
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
WATCHED = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.requestWillBeSent")

# Playwright's own wait_for_function evaluates text again and again, which the page's content security policy forbids.
WAIT = """patience => new Promise((resolve, reject) => {
  const end = performance.now() + patience;
  const look = () => {
    let met = false;
    try { met = Boolean(%s) } catch { /* what it asks about is not there yet */ }
    if (met) resolve();
    else if (performance.now() < end) setTimeout(look, 20);
    else reject(new Error(`not in time; the page reads ${document.body.innerText.slice(0, 2000)}`));
  };
  look();
})"""


class Page:
    """A tab of its own, as a person has it; its storage and cookies are shared with no other."""

    def __init__(self, portal: BlockingPortal, page: async_api.Page, devtools: async_api.CDPSession) -> None:
        self._portal = portal
        self._page = page
        self._devtools = devtools
        self._events: list[tuple[str, dict[str, Any]]] = []
        for method in WATCHED:
            devtools.on(method, partial(self._note, method))
            self.send(f"{method.split('.')[0]}.enable")

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append((method, params))

    def _call(self, function: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        return self._portal.call(partial(function, *arguments, **options))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of https://chromedevtools.github.io/devtools-protocol/ and returns the answer."""
        answer: dict[str, Any] = self._call(self._devtools.send, method, params)
        return answer

    def go(self, url: str) -> None:
        self._call(self._page.goto, url)

    def reload(self) -> None:
        self._call(self._page.reload)

    def js(self, expression: str) -> Any:
        """Returns the value of an expression, awaited. Raises Playwright's `Error` with what it threw."""
        return self._call(self._page.evaluate, expression)

    def call(self, function: str, *arguments: Any) -> Any:
        return self._call(self._page.evaluate, f"values => ({function})(...values)", list(arguments))

    def until(self, expression: str) -> None:
        """Waits for the expression to be true. An element that is not there yet is not an error."""
        self._call(self._page.evaluate, WAIT % expression, 1000 * PATIENCE)

    def until_reads(self, selector: str, text: str) -> None:
        """Waits for the text to stand there, among others."""
        self.until(f"document.querySelector({dumps(selector)}).innerText.includes({dumps(text)})")

    def until_count(self, selector: str, number: int) -> None:
        self.until(f"document.querySelectorAll({dumps(selector)}).length === {number}")

    def until_shown(self, selector: str) -> None:
        """Waits for an element that matches and is not hidden."""
        self._call(self._page.locator(selector).first.wait_for)

    def until_gone(self, selector: str) -> None:
        """Waits until the element is hidden, or is not there."""
        self._call(self._page.locator(selector).first.wait_for, state="hidden")

    def count(self, selector: str) -> int:
        number: int = self._call(self._page.locator(selector).count)
        return number

    def text(self, selector: str) -> str:
        """Returns what a reader sees there."""
        text: str = self._call(self._page.inner_text, selector)
        return text

    def texts(self, selector: str) -> list[str]:
        read = "nodes => nodes.map(node => node.innerText ?? node.textContent)"
        texts: list[str] = self._call(self._page.eval_on_selector_all, selector, read)
        return texts

    def attributes(self, selector: str, name: str) -> list[str]:
        read = "(nodes, name) => nodes.map(node => node.getAttribute(name))"
        values: list[str] = self._call(self._page.eval_on_selector_all, selector, read, name)
        return values

    def click(self, selector: str) -> None:
        """Clicks with the mouse, once the element is visible, holds still and is covered by no other."""
        self._call(self._page.click, selector)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Returns left, top, width and height on the screen, once it is scrolled to."""
        self._call(self._page.locator(selector).first.scroll_into_view_if_needed)
        box = self._call(self._page.locator(selector).first.bounding_box)
        return box["x"], box["y"], box["width"], box["height"]

    def move(self, x: float, y: float) -> None:
        self._call(self._page.mouse.move, x, y)

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the window another size, as on a desktop: on a telephone `innerWidth` grows with what overflows.

        The page's charts follow a frame later: wait for what is measured.
        """
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.until(f"innerWidth === {width}")

    def want_no_motion(self) -> None:
        self._call(self._page.emulate_media, reduced_motion="reduce")

    def press(self, *keys: str) -> None:
        """Presses named keys, one after the other."""
        for key in keys:
            self._call(self._page.keyboard.press, key)

    def type(self, text: str) -> None:
        self._call(self._page.keyboard.insert_text, text)

    def download(self, selector: str) -> tuple[str, str]:
        """Clicks there and returns the name and the text of the file that is downloaded."""

        async def download() -> tuple[str, Path]:
            async with self._page.expect_download() as coming:
                await self._page.click(selector)
            file = await coming.value
            return file.suggested_filename, await file.path()

        name, path = self._call(download)
        return name, path.read_text()

    def complaints(self) -> list[str]:
        """Returns errors of scripts, of the network and of the content security policy, and all that was logged."""
        logged = [f"{e['entry']['source']}: {e['entry']['text']}" for e in self._params_of("Log.entryAdded")]
        thrown = [str(e["exceptionDetails"]) for e in self._params_of("Runtime.exceptionThrown")]
        said = [str(e["args"]) for e in self._params_of("Runtime.consoleAPICalled")]
        return [*logged, *thrown, *said]

    def requested(self) -> set[str]:
        """Returns every address the page asked for."""
        return {event["request"]["url"] for event in self._params_of("Network.requestWillBeSent")}

    def _params_of(self, method: str) -> list[dict[str, Any]]:
        self.send("Runtime.evaluate", expression="0")  # what was sent before its answer has arrived
        return [params for sent, params in self._events if sent == method]


class Chromium:
    """A headless browser, for all tests of a process."""

    def __init__(self, portal: BlockingPortal, browser: async_api.Browser) -> None:
        self._portal = portal
        self._browser = browser

    @contextmanager
    def opened_page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """Opens a tab, which is a telephone's where it is narrow, and closes it at the end."""
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
    """Starts a browser with an empty profile that resolves no name but its own machine's."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(async_api.async_playwright()) as driver:
        launch = partial(driver.chromium.launch, executable_path=binary, args=FLAGS)
        with portal.wrap_async_context_manager(portal.call(launch)) as browser:
            yield Chromium(portal, browser)

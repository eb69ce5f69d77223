"""A tab of the browser with the page in it: tests read there what a person reads, and do what a person does."""

from collections.abc import Awaitable, Callable
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal
from playwright import async_api

PATIENCE = 240.0  # seconds until something that must happen counts as not happening
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
    """A tab of the browser, whose storage and cookies are shared with no other."""

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
        """Waits until the element reads so, among other words."""
        self.until(f"document.querySelector({dumps(selector)}).innerText.includes({dumps(text)})")

    def until_count(self, selector: str, number: int) -> None:
        self.until(f"document.querySelectorAll({dumps(selector)}).length === {number}")

    def until_shown(self, selector: str) -> None:
        """Waits for an element that matches and is not hidden."""
        self._call(self._page.locator(selector).first.wait_for)

    def until_gone(self, selector: str) -> None:
        """Waits until the element is hidden, or is not there."""
        self._call(self._page.locator(selector).first.wait_for, state="hidden")

    def until_asked(self, part: str) -> None:
        """Waits until the page has asked for an address with this part in it."""
        self.until(f"performance.getEntriesByType('resource').some(({{name}}) => name.includes({dumps(part)}))")

    def until_it_fits(self, *widths: int) -> None:
        """Waits at each width until neither the page nor a table scrolls sideways, which it does for a frame."""
        for width in widths:
            self.resize(width)
            self.until("document.documentElement.scrollWidth <= innerWidth")
            self.until("[...document.querySelectorAll('.scroller')].every(box => box.scrollWidth <= box.clientWidth)")

    def count(self, selector: str) -> int:
        number: int = self._call(self._page.locator(selector).count)
        return number

    def text(self, selector: str) -> str:
        text: str = self._call(self._page.inner_text, selector)
        return text

    def texts(self, selector: str) -> list[str]:
        read = "nodes => nodes.map(node => node.innerText ?? node.textContent)"
        texts: list[str] = self._call(self._page.eval_on_selector_all, selector, read)
        return texts

    def focused(self) -> str:
        text: str = self.js("document.activeElement.innerText")
        return text

    def column(self, table: str, number: int = 1) -> list[str]:
        """Returns the texts of a column's cells; the first column is 1."""
        return [text.strip() for text in self.texts(f"{table} tbody tr > :nth-child({number})")]

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
        """Gives the window another size, as on a desktop, because a telephone's `innerWidth` grows with what overflows.

        The page's charts follow a frame later: wait for what is measured.
        """
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.bringToFront")  # a tab in the background may draw no more frames, which charts wait for
        self.until(f"innerWidth === {width}")

    def want_no_motion(self) -> None:
        self._call(self._page.emulate_media, reduced_motion="reduce")

    def press(self, *keys: str) -> None:
        for key in keys:
            self._call(self._page.keyboard.press, key)

    def type(self, text: str) -> None:
        self._call(self._page.keyboard.insert_text, text)

    def tab_to(self, selector: str, most: int = 60) -> None:
        """Goes there by the Tab key alone, from wherever the focus is."""
        for _ in range(most):
            self.press("Tab")
            if self.call("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"{most} presses of Tab do not reach {selector}")

    def sign_in(self, key: str) -> None:
        self.click("#admin-key")
        self.type(key)
        self.press("Enter")

    def fill(self, selector: str, text: str) -> None:
        self._call(self._page.fill, selector, text)

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
        """Returns errors of scripts, of the network and of the content security policy, and what scripts logged."""
        logged = [f"{e['entry']['source']}: {e['entry']['text']}" for e in self._params_of("Log.entryAdded")]
        thrown = [str(e["exceptionDetails"]) for e in self._params_of("Runtime.exceptionThrown")]
        said = [str(e["args"]) for e in self._params_of("Runtime.consoleAPICalled")]
        return [*logged, *thrown, *said]

    def requested(self) -> set[str]:
        return {event["request"]["url"] for event in self._params_of("Network.requestWillBeSent")}

    def _params_of(self, method: str) -> list[dict[str, Any]]:
        self.send("Runtime.evaluate", expression="0")  # what was sent before its answer has arrived
        return [params for sent, params in self._events if sent == method]


PageMaker = Callable[..., Page]

"""One tab of the browser, as a person has it: what it reads, where the mouse goes, which keys are pressed."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.gateway.admin.page.devtools import PATIENCE, DevToolsError, Pipe

KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Space": (32, " "),
    "PageUp": (33, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
}


@dataclass
class Page:
    """A tab of its own: its storage and cookies are shared with no other."""

    pipe: Pipe
    session: str

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.pipe.send(method, self.session, **params)

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises `DevToolsError` with what it threw."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise DevToolsError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def call(self, function: str, *arguments: Any) -> Any:
        return self.js(f"({function})(...{json.dumps(arguments)})")

    def until(self, expression: str) -> None:
        """Wait for it to be true. An element that is not there yet is not an error."""
        deadline = time.monotonic() + PATIENCE
        while not self.js(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            assert time.monotonic() < deadline, f"not in time: {expression}; it reads {self.text('body')[:2000]!r}"
            time.sleep(0.02)

    def until_reads(self, selector: str, text: str) -> None:
        """Wait for the text to stand there, among others."""
        self.until(f"document.querySelector({json.dumps(selector)}).innerText.includes({json.dumps(text)})")

    def until_count(self, selector: str, number: int) -> None:
        self.until(f"document.querySelectorAll({json.dumps(selector)}).length === {number}")

    def count(self, selector: str) -> int:
        number: int = self.call("selector => document.querySelectorAll(selector).length", selector)
        return number

    def text(self, selector: str) -> str:
        """What a reader sees there."""
        text: str = self.call("selector => document.querySelector(selector).innerText", selector)
        return text

    def texts(self, selector: str) -> list[str]:
        read = "selector => [...document.querySelectorAll(selector)].map(node => node.innerText ?? node.textContent)"
        texts: list[str] = self.call(read, selector)
        return texts

    def attributes(self, selector: str, name: str) -> list[str]:
        read = "(selector, name) => [...document.querySelectorAll(selector)].map(node => node.getAttribute(name))"
        values: list[str] = self.call(read, selector, name)
        return values

    def click(self, selector: str) -> None:
        """With the mouse, where it is."""
        left, top, width, height = self.box(selector)
        x, y = left + width / 2, top + height / 2
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, x=x, y=y)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height on the screen, once it is scrolled to."""
        self.call("selector => document.querySelector(selector).scrollIntoView({block: 'center'})", selector)
        box = self.call("selector => document.querySelector(selector).getBoundingClientRect().toJSON()", selector)
        return box["left"], box["top"], box["width"], box["height"]

    def move(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size. The page's charts follow it a frame later: wait for what is measured."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.until(f"innerWidth === {width}")

    def press(self, *keys: str) -> None:
        """Named keys, one after the other."""
        for name in keys:
            code, text = KEYS[name]
            key = " " if name == "Space" else name
            self.send(
                "Input.dispatchKeyEvent", type="keyDown", key=key, code=name, windowsVirtualKeyCode=code, text=text
            )
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=name, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of those that came so far."""
        self.js("0")  # what was sent before its answer has arrived
        mine = [event for event in self.pipe.events if event.get("sessionId") == self.session]
        return [event["params"] for event in mine if event["method"] in methods]

    def complaints(self) -> list[str]:
        """Errors of scripts, of the network and of the content security policy."""
        logged = [f"{e['entry']['source']}: {e['entry']['text']}" for e in self.events("Log.entryAdded")]
        thrown = [json.dumps(e["exceptionDetails"]) for e in self.events("Runtime.exceptionThrown")]
        said = [json.dumps(e["args"]) for e in self.events("Runtime.consoleAPICalled")]
        return [*logged, *thrown, *said]

    def requested(self) -> set[str]:
        """Every address the page asked for."""
        return {event["request"]["url"] for event in self.events("Network.requestWillBeSent")}


@contextmanager
def opened_page(pipe: Pipe, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
    context = pipe.send("Target.createBrowserContext")["browserContextId"]
    target = pipe.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
    page = Page(pipe, pipe.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
    for domain in ("Page", "Runtime", "Network", "Log"):
        page.send(f"{domain}.enable")
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.send("Emulation.setEmulatedMedia", features=[scheme])
    page.send("Emulation.setFocusEmulationEnabled", enabled=True)
    try:
        yield page
    finally:
        pipe.send("Target.disposeBrowserContext", browserContextId=context)
        pipe.events.clear()

"""The promises of a fleet to its clients behind every kind of router: checks that several scripts share."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import httpx

from gateway.tenants.key_store import KeyStore
from labs.benchmarks.report import Report

TIMEOUT_SECONDS = 180.0  # for processes to start, each replica loading torch
MODEL, TENANT, LIMITED = "embedded", "acme", "limited"
POLICY = {"tenants": {TENANT: {}, LIMITED: {"limits": {"requests": "5/month"}}}}
SHORT = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 3 to 12."}], "temperature": 0}
LONG = SHORT | {"max_tokens": 1900, "n": 8, "ignore_eos": True, "stream": True}
SOME = SHORT | {"max_tokens": 300, "ignore_eos": True, "stream": True}
PAIRS = 60
GAUGES = r"^(?:sluice_live_requests|sluice_kv_blocks_used)\{.*\} (\S+)$"


@dataclass(frozen=True, slots=True)
class Replica:
    """A gateway behind the front."""

    pid: int
    url: str
    admin: str


class Site:
    """A fleet behind one address, for its users and its operator."""

    def __init__(self, front: str, folder: Path, port: int, keys: Mapping[str, str]) -> None:
        """`front` is the name of the server at `port`; `folder` has the state of all replicas."""
        self.front = front
        self.url = f"http://127.0.0.1:{port}"
        self._folder, self._port, self._keys = folder, port, keys
        self.admin = {"authorization": f"Bearer {KeyStore(folder / 'state').admin_key()}"}

    def replicas(self) -> Sequence[Replica]:
        """Return the running replicas."""
        raise NotImplementedError

    def request(self, body: dict[str, Any], url: str = "", tenant: str = TENANT) -> dict[str, Any]:
        """The arguments of httpx for a request through the front or to one replica."""
        headers = {"authorization": f"Bearer {self._keys[tenant]}"}
        return {
            "url": f"{url or self.url}/v1/chat/completions",
            "json": body,
            "headers": headers,
            "timeout": TIMEOUT_SECONDS,
        }

    def post(self, body: dict[str, Any], url: str = "", tenant: str = TENANT) -> httpx.Response:
        return httpx.post(**self.request(body, url, tenant))

    def stream(self, body: dict[str, Any], url: str = "") -> AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", **self.request(body, url))

    def is_busy(self, replica: Replica) -> bool:
        """True while a request lives there, or holds KV memory."""
        text = httpx.get(f"{replica.admin}/metrics", headers=self.admin, timeout=TIMEOUT_SECONDS).text
        return any(map(float, re.findall(GAUGES, text, re.MULTILINE)))


def equal_answers(site: Site, report: Report) -> None:
    targets = (site.url, site.replicas()[0].url)
    whole, streamed = ([ask(url) for url in targets] for ask in (partial(_whole, site), partial(_streamed, site)))
    report.at_least("a whole answer equals a direct one", float(whole[0] == whole[1]), 1)
    report.at_least("a streamed answer equals a direct one", float(streamed[0] == streamed[1]), 1)
    with site.stream(SOME) as response:
        parts = len([*response.iter_raw()])
    report.at_least("parts in which a stream of 300 tokens comes", float(parts), 10)
    with ThreadPoolExecutor(32) as pool:
        ends = Counter(pool.map(lambda _: end(site, SOME), range(32)))
    report.at_least("of 32 streams at once, complete", float(ends["complete"]), 32)


def _whole(site: Site, url: str) -> object:
    return site.post(SHORT, url).json()["choices"]


def _streamed(site: Site, url: str) -> list[object]:
    with site.stream(SHORT | {"stream": True}, url) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(event)["choices"] for event in events]


def limits(site: Site, report: Report) -> None:
    with ThreadPoolExecutor(6) as pool:
        statuses = Counter(pool.map(lambda _: site.post(SHORT, tenant=LIMITED).status_code, range(12)))
    report.at_least("of 12 requests of a tenant with 5, refused with 429", float(statuses[429]), 7)
    report.at_most("and answered", float(statuses[200]), 5)


def disconnects(site: Site, report: Report) -> None:
    """Measure the time from a client's leaving until no replica holds anything of its request."""
    for when, begin in (("while it streams", _leave_stream), ("before its answer", _leave_early)):
        waited = []
        for _ in range(10):
            begin(site)
            waited.append(seconds_until(lambda: not any(map(site.is_busy, site.replicas()))))
        report.at_most(f"seconds until a client that left {when} holds no KV memory, the longest of 10", max(waited), 1)


def _leave_stream(site: Site) -> None:
    with site.stream(LONG) as response:
        parts = response.iter_raw()  # held, or it would close the connection
        begun = next(parts)
        assert any(map(site.is_busy, site.replicas())), begun


def _leave_early(site: Site) -> None:
    with suppress(httpx.ReadTimeout):
        httpx.post(**site.request(LONG | {"stream": False}) | {"timeout": 0.5})


def latency(site: Site, report: Report, most: float) -> None:
    """Ask through the front and directly in turns, one at a time."""
    urls = (site.url, site.replicas()[0].url)
    first: dict[str, list[float]] = {url: [] for url in urls}
    whole: dict[str, list[float]] = {url: [] for url in urls}
    with httpx.Client() as client:
        for _ in range(PAIRS):
            for url in urls:
                began = time.perf_counter()
                with client.stream("POST", **site.request(SHORT | {"stream": True}, url)) as response:
                    parts = response.iter_raw()
                    next(parts)
                    first[url].append(time.perf_counter() - began)
                    list(parts)
                began = time.perf_counter()
                client.post(**site.request(SHORT, url))
                whole[url].append(time.perf_counter() - began)
    rows = []
    for what, seconds in (("first byte of a stream", first), ("whole answer of 23 tokens", whole)):
        fronted, direct = (1000 * median(one) for one in seconds.values())
        rows.append({"ms, median": what, f"through {site.front}": fronted, "direct": direct, "more": fronted - direct})
        report.at_most(f"ms that {site.front} adds to the {what}", fronted - direct, most)
    report.add_table(f"latency, {PAIRS} pairs in turns", rows)


@contextmanager
def asking(site: Site) -> Iterator[Counter[str]]:
    """Ask for short answers all the time while the block runs, and count how they end."""
    ends, stop = Counter[str](), Event()

    def ask() -> None:
        while not stop.wait(0.1):
            ends[end(site, SHORT)] += 1

    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask)
        try:
            yield ends
        finally:
            stop.set()


def end(site: Site, body: dict[str, Any]) -> str:
    """The end of a request: complete, the code of its error, its status without one, or cut."""
    try:
        with site.stream(body) as response:
            text = response.read().decode()
    except httpx.TransportError:
        return "cut"
    if found := re.search(r'"code":"(\w+)"', text):
        return found[1]
    is_whole = text.endswith("}")
    if body.get("stream"):
        is_whole = text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"') == body.get("n", 1)
    return "complete" if response.status_code == 200 and is_whole else f"status {response.status_code}"


def told(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {end}" for end, count in ends.most_common())


def seconds_until(condition: Callable[[], bool]) -> float:
    """Wait until the condition holds, and return the seconds. A failing question counts as False."""
    began = time.monotonic()
    while time.monotonic() < began + TIMEOUT_SECONDS:
        with suppress(httpx.HTTPError):
            if condition():
                return time.monotonic() - began
        time.sleep(0.02)
    raise SystemExit("it did not come true in time")

"""Counts the functions that a request crosses on the event loop's thread, in a server that runs in this process.

It runs `sluice serve` with the embedded model, sends it one request after the other and listens with `sys.setprofile`.
It knows nothing by name but what users rely on: the command, its flags, its announcement and the policy file. Two marks
cut what runs into trips. A request begins where an ASGI application of ours is called, see `_is_asgi`. A step is handed
to the device where code of `backend` puts something into a `queue.SimpleQueue`, see `_is_submit`. What runs in
libraries, on the device's threads and on others is not counted.

A call is a function of ours that begins, one whose code lies in a file of the five packages. What libraries generate,
such as the `__init__` of a dataclass, lies in none. A trip is its number of calls by file.
"""

import dis
import inspect
import io
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib import import_module
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

KEY = "sk-sluice-structure-0123456789"
READY = re.compile(r"ready at http://127\.0\.0\.1:(\d+)")
WARM_UP = 3  # requests that fill caches and trigger late imports
TOKENS = 40  # of each answer
EDGE_STEPS = 5  # steps at both ends of an answer that do more than decode
PAUSE_SECONDS = 0.05  # between requests, for the step planned ahead of the last one's end to come back
FLAGS = ("--port=0", "--admin-port=0", "--device=cpu", "--threads=1", "--log-level=error")
LIMITS = """\
defaults:
  limits: {requests: 600k/min, tokens: {rate: 1B/min, burst: 1B}, concurrent_requests: 64}
"""


Trip = Counter[str]


class Trips:
    """A profile function for one thread, which cuts what runs there into trips."""

    def __init__(self, root: Path, packages: Iterable[str]) -> None:
        self.requests: list[Trip] = []  # each from its endpoint to the first step handed to the device
        self.steps: list[list[Trip]] = []  # of each request: from one step handed to the device to the next
        self.ended = False
        self._root = f"{root}{os.sep}"
        self._sources = tuple(f"{root / package}{os.sep}" for package in packages)
        self._known: dict[CodeType, tuple[str, int]] = {}
        self._trip: Trip | None = None
        self._arrives = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.ended:
            return
        if event == "call":
            self._enter(frame)
        elif event == "c_call" and _is_submit(arg) and self._look_up(frame.f_code)[0].startswith("backend"):
            self._submitted()

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        file, body = self._look_up(code)
        if not file:
            return
        if not self._arrives and _is_asgi(code) and _begins(code, frame.f_lasti, body):
            self._arrives, self._trip = True, Trip()
        if self._trip is not None and _begins(code, frame.f_lasti, body):
            self._trip[file] += 1

    def _submitted(self) -> None:
        if self._trip is None:
            return
        if self._arrives:
            self._arrives = False
            self.requests.append(self._trip)
            self.steps.append([])
        else:
            self.steps[-1].append(self._trip)
        self._trip = Trip()

    def _look_up(self, code: CodeType) -> tuple[str, int]:
        """Return its file, relative to the root and empty for a foreign file, and the offset of its body."""
        if code not in self._known:
            is_ours = code.co_filename.startswith(self._sources)
            self._known[code] = (code.co_filename.removeprefix(self._root), _body_of(code)) if is_ours else ("", 0)
        return self._known[code]


def _is_asgi(code: CodeType) -> bool:
    return code.co_varnames[: code.co_argcount][-3:] == ("scope", "receive", "send")


def _is_submit(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), SimpleQueue) and function.__name__ == "put"


def _body_of(code: CodeType) -> int:
    return next((step.offset for step in dis.get_instructions(code) if step.opname == "RESUME"), 0)


def _begins(code: CodeType, last: int, body: int) -> bool:
    """Return True if a function begins as a frame is entered. `last` is the frame's last instruction, negative for
    none.

    Calling a coroutine function enters its frame once to make the coroutine, which Python 3.12 no longer tells of, and
    once more when the coroutine begins: the second counts.
    """
    if code.co_name in {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}:
        return False
    is_resumable = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    return not is_resumable or 0 <= last <= body


class Announcement(io.StringIO):
    """Stands for the standard output of a server. The announcement starts the profile, on the event loop's thread that
    prints it, and the client, on another.
    """

    def __init__(self, trips: Trips, client: Callable[[int], None], threads: ThreadPoolExecutor) -> None:
        super().__init__()
        self.client: Future[None] | None = None  # None until the server serves
        self._client = client
        self._threads = threads
        self._trips = trips

    def write(self, text: str) -> int:
        if self.client is None and (ready := READY.search(text)):
            self.client = self._threads.submit(self._client, int(ready.group(1)))
            sys.setprofile(self._trips)
        return super().write(text)


@dataclass(frozen=True)
class Paths:
    """The trips whose number of calls is the median one."""

    request: Trip  # from the endpoint to the first step handed to the device, of a streamed answer
    streamed_step: Trip  # from one step handed to the device to the next, with what is written to the client
    step: Trip  # the same of an answer that is written whole


def with_limits(root: Path, packages: Iterable[str], requests: int) -> Paths:
    """As `with_defaults`, with limits on every tenant and an event log."""
    with TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(LIMITS)
        return _serve(Trips(root, packages), requests, f"--policy={policy}", f"--event-log={folder}/events.jsonl")


def with_defaults(root: Path, packages: Iterable[str], requests: int) -> Paths:
    """Serve `requests` streamed chats and then as many whole ones, one at a time, with default settings.

    Call it on the main thread, which is where a server hears signals. Raises `SystemExit` when it cannot be measured.
    """
    return _serve(Trips(root, packages), requests)


def _serve(trips: Trips, requests: int, *flags: str) -> Paths:
    streams = [True] * (WARM_UP + requests) + [False] * requests

    def client(port: int) -> None:
        try:
            _ask(port, streams)
        finally:
            trips.ended = True
            os.kill(os.getpid(), signal.SIGINT)

    for name in [name for name in os.environ if name.startswith(("SLUICE_", "OTEL_"))]:  # they would change defaults
        del os.environ[name]
    os.environ["SLUICE_DEMO_KEY"] = KEY
    import_module("admission.controller")  # what is there before the command is not compiled, and can be listened to
    command = import_module("sluice.__main__").main
    with TemporaryDirectory() as state, ThreadPoolExecutor(1) as threads:
        said = Announcement(trips, client, threads)
        status = _profiled(lambda: command(["serve", f"--state-dir={state}", *FLAGS, *flags]), said)
    if said.client is None or status:
        raise SystemExit(f"sluice serve ended with status {status}: {said.getvalue()}")
    said.client.result()
    if len(trips.requests) != len(streams):
        raise SystemExit(f"{len(trips.requests)} of {len(streams)} requests were seen: see _is_asgi and _is_submit")
    return _paths(trips, requests)


def _paths(trips: Trips, requests: int) -> Paths:
    steps = [steps[EDGE_STEPS:-EDGE_STEPS] for steps in trips.steps[WARM_UP:]]
    streamed, whole = chain(*steps[:requests]), chain(*steps[requests:])
    return Paths(_median(trips.requests[WARM_UP:-requests]), _median(streamed), _median(whole))


def _median(trips: Iterable[Trip]) -> Trip:
    ordered = sorted(trips, key=Trip.total)
    return ordered[len(ordered) // 2]


def _profiled(run: Callable[[], int], said: Announcement) -> int:
    try:
        with redirect_stdout(said):
            return run()
    finally:
        sys.setprofile(None)


def _ask(port: int, streams: Iterable[bool]) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    for number, stream in enumerate(streams):
        message = {"role": "user", "content": f"Tell me a story of {number} sentences."}
        body = {"model": "embedded", "messages": [message], "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {answer.decode()}")
        time.sleep(PAUSE_SECONDS)
    connection.close()

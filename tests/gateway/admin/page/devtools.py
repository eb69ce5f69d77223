"""A headless Chromium over the DevTools protocol, through a pipe: no driver, no port.

https://chromedevtools.github.io/devtools-protocol/
"""

import fcntl
import json
import os
import select
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 240.0  # seconds until something that must happen counts as not happening
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class DevToolsError(Exception):
    """Chromium refused a command, or a script of the page threw."""


class Pipe:
    """Commands out, answers and events in; each is JSON and ends with a NUL."""

    def __init__(self, reading: int, writing: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._reading = reading
        self._writing = writing
        self._buffer = b""
        self._last_id = 0

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result. Raises `DevToolsError`."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        os.write(self._writing, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") != self._last_id:
                self.events.append(message)
            elif "error" in message:
                raise DevToolsError(f"{method}: {message['error']['message']}")
            else:
                result: dict[str, Any] = message["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], PATIENCE)
            assert ready, "Chromium does not answer"
            part = os.read(self._reading, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextmanager
def running_chromium(binary: str, profile: Path) -> Iterator[Pipe]:
    """A process with a new profile; it reads commands from its descriptor 3 and answers on 4."""
    commands, answers = map(_above_the_standard_ones, (os.pipe(), os.pipe()))
    command = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    log = os.open(profile.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
    moves = [(os.POSIX_SPAWN_DUP2, commands[0], 3), (os.POSIX_SPAWN_DUP2, answers[1], 4)]
    outputs = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    pid = os.posix_spawn(binary, command, os.environ, file_actions=[*moves, *outputs])
    for descriptor in (commands[0], answers[1], log):
        os.close(descriptor)
    pipe = Pipe(answers[0], commands[1])
    try:
        yield pipe
        pipe.send("Browser.close")
    finally:
        os.close(commands[1])  # which ends it as well
        os.close(answers[0])
        os.waitpid(pid, 0)


def _above_the_standard_ones(pipe: tuple[int, int]) -> tuple[int, int]:
    """The same pipe on descriptors that 3 and 4 do not overwrite."""
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe)
    for end in pipe:
        os.close(end)
    return reading, writing

"""A replica on this machine as a child process: starts `sluice serve`, polls its state, and stops it in order.

It is a process of its own, and not an application in its owner's, because a gateway needs the process's signals,
collector, switch interval and loop for itself; because a failed device ends the process; and because the child outlives
a killed owner until its requests' use is settled.
"""

import asyncio
import logging
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from ssl import create_default_context

import httpx

from fleet.upstream import make_client
from gateway.admin.port import admin_secret
from gateway.background import wait_awake
from gateway.cli.flags import SettingsError, add_flags, load
from gateway.replica.state import ReplicaState, parse_state
from gateway.settings.settings import Settings

log = logging.getLogger(__name__)

OWN_PORTS = ("--host=127.0.0.1", "--port=0", "--admin-port=0")  # defaults, which the user's flags may change
ASK_SECONDS = 5.0  # for an answer of its probes or its state
STOP_SECONDS = 15.0  # beyond its drain timeout, then it is killed
_READY = re.compile(r" is ready at (http://\S+)$")
_ADMIN = re.compile(r"^  admin +(http://[^\s,]+)")


class ChildFailed(Exception):
    """A replica does not serve; the message has the reason."""


def settings_of(flags: Sequence[str]) -> Settings:
    """The settings of a child with these flags. Raises `SettingsError`."""
    parser = ArgumentParser(prog="sluice serve", allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    namespace, unknown = parser.parse_known_args([*OWN_PORTS, *flags])
    if unknown:
        raise SettingsError(f"{' '.join(unknown)}: no flags of `sluice serve`, see its --help")
    settings = load(namespace)
    if settings.admin_port == "off":
        raise SettingsError("--admin-port off: a replica's state is read there; leave the flag out")
    if settings.tls_cert_file is not None:
        raise SettingsError("--tls-cert-file: TLS ends at the proxy in front of a replica; leave it out")
    return settings


class ChildReplica:
    """One `sluice serve` with these flags; `on_lost` is called when it ends unasked.

    It belongs to the loop, and the thread, that starts it, and is told to stop when that thread is gone.
    """

    def __init__(
        self, flags: Sequence[str], on_lost: Callable[[], object] = lambda: None, program: str = "sluice"
    ) -> None:
        """`program` is a module that runs as `sluice` does."""
        self.settings = settings_of(flags)
        self.url = self.admin_url = ""
        self._arguments = [program, "serve", *OWN_PORTS, *flags]
        self._on_lost = on_lost
        self._is_stopping = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Return once it serves. Raises `ChildFailed`."""
        command = [sys.executable, "-m", "backend.bound_to_parent", str(os.getpid()), *self._arguments]
        self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - this thread is the parent for the kernel
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        await asyncio.to_thread(self._read_announcement)
        self.client = make_client(create_default_context())
        self._ended = asyncio.create_task(self._wait())

    def _read_announcement(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := _READY.search(line):
                self.url = found[1]
            if found := _ADMIN.match(line):
                self.admin_url = found[1]
                return
        self._process.communicate()
        raise ChildFailed(f"sluice serve ended with status {self._process.returncode} before it served: see its log")

    async def _wait(self) -> None:
        await asyncio.to_thread(self._process.communicate)
        if not self._is_stopping:
            log.error("the replica, process %d, has ended with status %d", self.pid, self._process.returncode)
            self._on_lost()

    async def check(self) -> None:
        """Raise `ChildFailed` if its liveness probe fails."""
        await self._ask(f"{self.url}/livez")

    async def state(self) -> ReplicaState:
        """The replica's state. Raises `ChildFailed` and `StateError`."""
        key = admin_secret(self.settings)
        reply = await self._ask(f"{self.admin_url}/admin/v1/state", {"authorization": f"Bearer {key}"})
        return parse_state(reply.content)

    async def _ask(self, url: str, headers: dict[str, str] | None = None) -> httpx.Response:
        try:
            reply = await self.client.get(url, headers=headers, timeout=ASK_SECONDS)
        except httpx.HTTPError as error:
            raise ChildFailed(f"{url} does not answer: {type(error).__name__} {error}") from None
        if reply.status_code != httpx.codes.OK:
            raise ChildFailed(f"{url} answers {reply.status_code}: {reply.text:.200}")
        return reply

    async def stop(self) -> None:
        """Drain it, and return when it has ended; kill it after its timeout."""
        self._is_stopping = True
        self._process.terminate()
        patience = self.settings.drain_delay + self.settings.drain_timeout + STOP_SECONDS
        await wait_awake(patience, self._ended)
        if not self._ended.done():
            log.error("the replica, process %d, did not end in %g s and is killed", self.pid, patience)
            self._process.kill()
        await self._ended
        await self.client.aclose()

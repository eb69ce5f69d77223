"""The sources of a router's replicas: a file, a name in DNS, or announcements in the quota store."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from fleet.replicas import ReplicasError, ReplicasUnreadable, parse_replica, read_replicas
from fleet.view import ReplicaAddress
from gateway.tenants.file_watch import FileWatcher, signature
from quotas.errors import QuotaError
from quotas.policy.units import counted

log = logging.getLogger(__name__)

DNS_SECONDS = 1.0  # between lookups
STORE_SECONDS = 0.5  # likewise
GRACE_SECONDS = 5.0  # for replicas to announce themselves again after the store lost its data

SetReplicas = Callable[[Iterable[ReplicaAddress]], object]


class Membership(Protocol):
    """A source of a router's list of replicas."""

    async def watch(self, set_replicas: SetReplicas) -> None:
        """Report the present replicas, and all again after each change, as long as the router runs."""
        ...


class FileMembership:
    """A file, whose edits are followed; an invalid edit changes nothing, and a file that cannot be read is read again
    until it can. Raises `ReplicasError` at first.
    """

    def __init__(self, path: Path, by_address: bool = False) -> None:
        """With `by_address` a host has to be an IP address."""
        self._path = path
        self._read = partial(read_replicas, path, by_address)
        self._first_read = signature([path])  # before it was read
        self._replicas = self._read()

    async def watch(self, set_replicas: SetReplicas) -> None:
        problem = ""  # of the last reading

        async def edited() -> None:
            nonlocal problem
            try:
                replicas = await asyncio.to_thread(self._read)
            except ReplicasError as error:
                if isinstance(error, ReplicasUnreadable):
                    watcher.read_again()
                    if problem == str(error):
                        return
                problem = str(error)
                log.error("the replicas stay as they were: %s", error)
                return
            problem = ""
            set_replicas(replicas)
            log.info("%s in the file", counted(len(replicas), "replica"))

        set_replicas(self._replicas)
        watcher = FileWatcher(lambda: [self._path], edited, self._first_read)
        await watcher.run()


class DnsMembership:
    """A name whose addresses are the replicas', such as a headless service's in Kubernetes.

    While it cannot be resolved, the replicas stay as they were.
    """

    def __init__(self, name: str, port: int, admin_port: int) -> None:
        self._name, self._port, self._admin_port = name, port, admin_port
        self._addresses: list[str] = []
        self._problem = ""  # of the last lookup

    async def watch(self, set_replicas: SetReplicas) -> None:
        while True:
            await self.ask(set_replicas)
            await asyncio.sleep(DNS_SECONDS)

    async def ask(self, set_replicas: SetReplicas) -> None:
        """Resolve the name once."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            if self._problem != str(error):
                log.warning("the replicas stay as they were: %s cannot be resolved: %s", self._name, error)
            self._problem = str(error)
            return
        self._problem = ""
        addresses = sorted({str(address[0]) for *_, address in found})
        if addresses != self._addresses:
            self._addresses = addresses
            set_replicas([self._replica(address) for address in addresses])
            log.info("%s has %s", self._name, counted(len(addresses), "address"))

    def _replica(self, address: str) -> ReplicaAddress:
        host = f"[{address}]" if ":" in address else address
        return ReplicaAddress(f"http://{host}:{self._port}", f"http://{host}:{self._admin_port}")


class AnnouncementReader(Protocol):
    """The announcements of a fleet, as the quota store keeps them."""

    async def read(self) -> tuple[str, Sequence[bytes]]:
        """The begin of the announcements, and all of them. Raises `QuotaError`."""
        ...


class StoreMembership:
    """Replicas that announce themselves in the quota store (`--advertise`).

    While the store is away, and for `GRACE_SECONDS` after it lost its data, the replicas stay as they were.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractAsyncContextManager[AnnouncementReader]],
        unsealed: Callable[[bytes], bytes | None],
        by_address: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`opened` connects to the store. `unsealed` verifies an announcement, None if it is not of our fleet. With
        `by_address` a host has to be an IP address.
        """
        self._opened, self._unsealed, self._by_address, self._clock = opened, unsealed, by_address, clock
        self._known: dict[str, ReplicaAddress] = {}  # by name
        self._since = ""
        self._kept_until = 0.0  # moment before which no replica is removed
        self._problem = ""  # of the last lookup
        self._refused: set[bytes] = set()  # announcements that are invalid or not of our fleet

    async def watch(self, set_replicas: SetReplicas) -> None:
        async with self._opened() as announcements:
            while True:
                await self.ask(announcements, set_replicas)
                await asyncio.sleep(STORE_SECONDS)

    async def ask(self, announcements: AnnouncementReader, set_replicas: SetReplicas) -> None:
        """Read the announcements once."""
        try:
            since, said = await announcements.read()
        except QuotaError as error:
            if self._problem != str(error):
                log.warning("the replicas stay as they were: %s", error)
            self._problem = str(error)
            return
        self._problem = ""
        found = {one.name: one for one in map(self._address, said) if one is not None}
        self._refused.intersection_update(said)
        if since and since != self._since:
            self._kept_until = self._clock() + GRACE_SECONDS if self._since else 0.0
            self._since = since
        if not since or self._clock() < self._kept_until:
            found = self._known | found
        if found != self._known:
            self._known = found
            set_replicas(found.values())
            log.info("%s announced", counted(len(found), "replica"))

    def _address(self, said: bytes) -> ReplicaAddress | None:
        opened = self._unsealed(said)
        address = parse_replica(opened, self._by_address) if opened is not None else None
        if address is None and said not in self._refused:
            self._refused.add(said)
            why = (
                "signed with another pepper than ours" if opened is None else "not an address that the gateway accepts"
            )
            log.warning("an announced replica is ignored: %s", why)
        return address

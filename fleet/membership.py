"""Where a router learns which replicas there are: a file, or the addresses that a name has in DNS."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from fleet.replicas import ReplicaAddress, ReplicasError, read_replicas
from gateway.tenants.file_watch import FileWatcher, signature

log = logging.getLogger(__name__)

DNS_SECONDS = 1.0  # between two questions

SetReplicas = Callable[[Iterable[ReplicaAddress]], object]


class Membership(Protocol):
    """Tells a router of replicas."""

    async def watch(self, set_replicas: SetReplicas) -> None:
        """Name the replicas that there are, and name all again when they have changed, as long as the router runs."""
        ...


class FileMembership:
    """A file, whose edits are taken up; one that makes no sense changes nothing. Raises `ReplicasError` at first."""

    def __init__(self, path: Path, by_address: bool = False) -> None:
        """With `by_address` a host has to be an IP address."""
        self._path = path
        self._read = partial(read_replicas, path, by_address)
        self._first_read = signature([path])  # before it was read
        self._replicas = self._read()

    async def watch(self, set_replicas: SetReplicas) -> None:
        async def edited() -> None:
            try:
                replicas = await asyncio.to_thread(self._read)
            except ReplicasError as error:
                log.error("the replicas stay as they were: %s", error)
                return
            set_replicas(replicas)
            log.info("%d replicas are in the file", len(replicas))

        set_replicas(self._replicas)
        await FileWatcher(lambda: [self._path], edited, self._first_read).run()


class DnsMembership:
    """A name, each of whose addresses is a replica's, such as that of a headless service of Kubernetes. While it cannot
    be resolved, the replicas stay as they were.
    """

    def __init__(self, name: str, port: int, admin_port: int) -> None:
        self._name, self._port, self._admin_port = name, port, admin_port
        self._addresses: list[str] = []
        self._problem = ""  # of the last question

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
            log.info("%s has %d addresses", self._name, len(addresses))

    def _replica(self, address: str) -> ReplicaAddress:
        host = f"[{address}]" if ":" in address else address
        return ReplicaAddress(f"http://{host}:{self._port}", f"http://{host}:{self._admin_port}")

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.membership import GRACE_SECONDS, DnsMembership, FileMembership, StoreMembership
from fleet.replicas import ReplicasError
from fleet.view import ReplicaAddress
from gateway.replica.announcer import addresses
from gateway.replica.fleet_secret import FleetSecret
from quotas.errors import StoreUnavailable

ONE, TWO = (f"replicas: [{{url: 'http://{host}:1', admin: 'http://{host}:2'}}]" for host in "ab")


class Heard(list[list[str]]):
    """The names of each set of replicas, as they came."""

    def set_replicas(self, replicas: Iterable[ReplicaAddress]) -> None:
        self.append([one.name for one in replicas])


async def test_a_file_is_read_at_first_and_when_it_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tenants.file_watch.INTERVAL_SECONDS", 0.001)
    file, heard = tmp_path / "replicas.yaml", Heard()
    with pytest.raises(ReplicasError):
        FileMembership(file)
    file.write_text(ONE)
    watching = asyncio.create_task(FileMembership(file).watch(heard.set_replicas))
    while len(heard) < 1:
        await asyncio.sleep(0)
    file.write_text(TWO)
    while len(heard) < 2:
        await asyncio.sleep(0.001)
    watching.cancel()
    assert heard == [["a:1"], ["b:1"]]


async def test_an_edit_while_the_file_cannot_be_read_is_followed_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, heard, failures = tmp_path / "replicas.yaml", Heard(), [OSError(errno.EMFILE, "Too many open files")] * 2
    file.write_text(ONE)
    membership, read = FileMembership(file), Path.read_bytes

    def refuse(path: Path) -> bytes:
        if failures:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    file.write_text(TWO)
    watching = asyncio.create_task(membership.watch(heard.set_replicas))
    while len(heard) < 2:
        await asyncio.sleep(0.001)
    watching.cancel()
    assert heard == [["a:1"], ["b:1"]]
    assert caplog.text.count("Too many open files") == 1


class Resolver:
    """Answers for DNS."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] | None = []
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.getaddrinfo)

    async def getaddrinfo(self, name: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert (name, port) == ("replicas", 8000)
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(0, 0, 0, "", (address, port)) for address in self.addresses]


async def test_each_address_of_a_name_is_a_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dns, membership, heard = Resolver(monkeypatch), DnsMembership("replicas", 8000, 8001), Heard()
    for found in (["10.0.0.2", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"], None, None, ["10.0.0.2", "::1"], []):
        dns.addresses = found
        await membership.ask(heard.set_replicas)
    assert heard == [["10.0.0.1:8000", "10.0.0.2:8000"], ["10.0.0.2:8000", "[::1]:8000"], []]
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


SECRET = FleetSecret(b"p" * 32)


def said(host: str, secret: FleetSecret = SECRET) -> bytes:
    return secret.sealed(addresses(f"http://{host}", 1, 2))


class Told:
    """The store, as it answers; None: it is away."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answer: tuple[str, list[bytes]] | None = "", []
        self.heard = Heard()
        self.membership = StoreMembership(self.opened, SECRET.opened, clock=lambda: self.now)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["Told"]:
        yield self

    async def read(self) -> tuple[str, list[bytes]]:
        if self.answer is None:
            raise StoreUnavailable("away")
        return self.answer

    async def ask(self, since: str, *said: bytes) -> list[str]:
        """What the router goes by once it has asked."""
        self.answer = since, [*said]
        await self.membership.ask(self, self.heard.set_replicas)
        return self.heard[-1] if self.heard else []


async def test_an_announced_replica_counts_until_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    assert await told.ask("") == []
    assert await told.ask("1", said("a"), said("b")) == ["a:1", "b:1"]
    told.answer = None
    for _ in range(2):
        await told.membership.ask(told, told.heard.set_replicas)
    assert len(told.heard) == 1, "an outage changes nothing"
    assert sum("stay as they were" in record.message for record in caplog.records) == 1
    assert await told.ask("1", said("b")) == ["b:1"]
    assert await told.ask("1") == []


async def test_replicas_have_time_to_come_back_into_a_store_that_lost_them() -> None:
    told = Told()
    await told.ask("1", said("a"), said("b"), said("c"))
    assert await told.ask("") == ["a:1", "b:1", "c:1"]
    assert await told.ask("2", said("b")) == ["a:1", "b:1", "c:1"]
    told.now += GRACE_SECONDS
    assert await told.ask("2", said("b"), said("c")) == ["b:1", "c:1"]


async def test_no_requests_and_no_admin_key_go_to_a_replica_without_the_pepper(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    forged = said("evil", FleetSecret(b"q" * 32)), said("a").replace(b"http://a:1", b"http://b:1"), b"", b"x y"
    for _ in range(2):
        assert await told.ask("1", *forged, said("a"), SECRET.sealed(b"{}"), SECRET.sealed(b"[")) == ["a:1"]
    assert sum("is ignored" in record.message for record in caplog.records) == 6


async def test_a_picker_takes_addresses_and_no_names() -> None:
    told = Told()
    told.membership = StoreMembership(told.opened, SECRET.opened, by_address=True)
    assert await told.ask("1", said("a"), said("10.0.0.1")) == ["10.0.0.1:1"]

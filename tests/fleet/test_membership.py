import asyncio
import logging
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fleet.membership import DnsMembership, FileMembership
from fleet.replicas import ReplicaAddress, ReplicasError

ONE, TWO = (f"replicas: [{{url: 'http://{host}:1', admin: 'http://{host}:2'}}]" for host in "ab")


class Heard(list[list[str]]):
    """The names of each set of replicas, as they came."""

    def set_replicas(self, replicas: Iterable[ReplicaAddress]) -> None:
        self.append([one.name for one in replicas])


async def test_a_file_is_read_at_first_and_when_it_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tenants.file_watch.INTERVAL", 0.001)
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
    for addresses in (["10.0.0.2", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"], None, None, ["10.0.0.2", "::1"], []):
        dns.addresses = addresses
        await membership.ask(heard.set_replicas)
    assert heard == [["10.0.0.1:8000", "10.0.0.2:8000"], ["10.0.0.2:8000", "[::1]:8000"], []]
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1

import asyncio
import logging

import orjson
import pytest

from gateway.replica.announcer import Announcer, addresses
from quotas.errors import StoreUnavailable


class Said:
    """The announcements, as they come."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_away = False

    async def announce(self, replica: str, said: bytes) -> None:
        self._note(f"{replica} at {said.decode()}")

    async def leave(self, replica: str) -> None:
        self._note(f"{replica} leaves")

    def _note(self, call: str) -> None:
        if self.is_away:
            raise StoreUnavailable("away")
        self.calls.append(call)


@pytest.mark.parametrize(
    ("advertised", "told"),
    [
        ("http://10.0.0.1", "http://10.0.0.1:8000 http://10.0.0.1:8001"),
        ("http://10.0.0.1:80", "http://10.0.0.1:80 http://10.0.0.1:8001"),
        ("https://[::1]:9000", "https://[::1]:9000 https://[::1]:8001"),
    ],
)
def test_a_port_that_is_not_advertised_is_its_own(advertised: str, told: str) -> None:
    said = orjson.loads(addresses(advertised, 8000, 8001))
    assert f"{said['url']} {said['admin']}" == told


async def test_it_is_announced_while_it_serves_and_taken_back_once() -> None:
    said, serves = Said(), False
    announcer = Announcer(said, "r", b"url", lambda: serves)
    await announcer.tell()
    await announcer.leave()
    assert not said.calls
    serves = True
    await announcer.tell()
    await announcer.tell()
    serves = False
    await announcer.tell()
    await announcer.tell()
    await announcer.leave()
    assert said.calls == ["r at url", "r at url", "r leaves"]


async def test_a_store_that_is_away_is_told_again_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.replica.announcer.PERIOD_SECONDS", 0.0)
    said = Said()
    said.is_away = True
    running = asyncio.create_task(Announcer(said, "r", b"url", lambda: True).run())
    for _ in range(9):
        await asyncio.sleep(0)
    said.is_away = False
    while not said.calls:
        await asyncio.sleep(0)
    running.cancel()
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1

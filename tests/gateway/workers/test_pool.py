"""Workers that do not come to serve, and a pool that ends meanwhile."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from gateway.http.connection import bound_socket
from gateway.http.server import ListenError
from gateway.settings.settings import Settings
from gateway.workers.messages import Setup, Update
from gateway.workers.pool import CHECK_SECONDS, SILENT_SECONDS, WorkerPool, _Seat
from quotas.policy.policy import Policy
from tests.gateway.paper_gateway import Gateway
from tests.gateway.workers.test_served_worker import until

SETTINGS = Settings(http_workers=2)


@pytest.fixture
def sockets() -> "list[socket.socket]":
    return [bound_socket("127.0.0.1", 0) for _ in range(2)]


async def serve(gateway: Gateway, pool: WorkerPool, sockets: list[socket.socket]) -> None:
    served, policy = gateway.frontend.model, gateway.service.policies.current
    assert isinstance(policy, Policy)
    try:
        await pool.serve(
            sockets,
            gateway.client,
            lambda: Setup(SETTINGS, served, Path(), 1024, [], b"", [], policy, set(), set()),
        )
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize(
    ("program", "said"), [("/bin/false", "ended with status 1"), ("/nonexistent", "could not be started")]
)
async def test_a_gateway_whose_workers_cannot_start_says_so(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, sockets: list[socket.socket], program: str, said: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    started: list[bool] = []
    pool = WorkerPool(SETTINGS, lambda: started.append(True))
    with pytest.raises(ListenError, match=f"{said}.*--http-workers 0"):
        await serve(gateway, pool, sockets)
    assert not started and not pool.started


@pytest.mark.parametrize("program", ["/bin/false", "/nonexistent"])
async def test_a_gateway_that_serves_tries_again_until_it_is_told_to_end(
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sockets: list[socket.socket],
    program: str,
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    pool = WorkerPool(SETTINGS, lambda: None)
    pool.started = True
    serving = asyncio.create_task(serve(gateway, pool, sockets))
    async with asyncio.timeout(240):
        while pool.table.num_restarts < 4:
            await asyncio.sleep(0.01)
    await pool.update(Update())  # it waits for nobody that does not serve
    pool.end()
    await serving
    assert "another starts in" in caplog.text
    assert pool._num_up() == 0
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


def test_a_worker_is_not_held_to_the_time_in_which_the_gateway_stood_still(sockets: list[socket.socket]) -> None:
    seat = _Seat(WorkerPool(SETTINGS, lambda: None), 0, sockets[0], None, None)  # type: ignore[arg-type]
    seat.waited(1000 * SILENT_SECONDS)
    assert seat._silence < SILENT_SECONDS / 10
    for _ in range(int(SILENT_SECONDS / CHECK_SECONDS)):
        seat.waited(CHECK_SECONDS)
    assert seat._silence >= SILENT_SECONDS
    for sock in sockets:
        sock.close()

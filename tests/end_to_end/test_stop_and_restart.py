"""A server is told to stop or is killed: promises are kept or refused properly, and every token is accounted for."""

import asyncio
import json
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import httpx
from redis import Redis

from quotas.reservation import Usage
from quotas.store.redis_store import RedisStore
from tests.gateway.raw_client import chat, completion, connected, request
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually, in_threads, running_server
from tests.quotas.stores import usage_by_key

NUM_STREAMS, MANY_TOKENS = 16, 500
ENDLESS = completion(ignore_eos=True, max_tokens=1900)
POLICY = "tenants: {demo: {limits: {tokens: 10M/month, concurrent_requests: 100}}}"


def flags(directory: Path, **more: object) -> list[str]:
    policy = directory / "policy.yaml"
    policy.write_text(POLICY)
    given = {"threads": 1, "policy": policy} | more
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


class Streams:
    """Clients that each read one stream to its end."""

    def __init__(self, server: ServerProcess, count: int, max_tokens: int) -> None:
        self._server = server
        self._max_tokens = max_tokens
        self._begun = threading.Barrier(count + 1)
        self._pool = ThreadPoolExecutor(count)
        self._results: list[Future[list[str]]] = [self._pool.submit(self._read) for _ in range(count)]

    def begun(self) -> None:
        """Return when each has had its first token."""
        self._begun.wait(PATIENCE)

    def ends(self) -> list[list[str]]:
        with self._pool:
            return [result.result() for result in self._results]

    def _read(self) -> list[str]:
        options = {"include_usage": True}
        body = completion(ignore_eos=True, max_tokens=self._max_tokens, stream_options=options)
        with self._server.stream("/v1/completions", **body) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            events = [next(lines)]
            self._begun.wait(PATIENCE)
            return [*events, *lines]


def ledger(redis_url: str) -> Usage:
    """What the store has booked for the tenant today."""

    async def read() -> Usage:
        store = RedisStore.at(redis_url, 5.0)
        await store.connect()
        usages = (await usage_by_key(store, "demo", datetime.now(UTC).date())).values()
        await store.close()
        return Usage(
            sum(usage.input_tokens for usage in usages),
            sum(usage.output_tokens for usage in usages),
            requests=sum(usage.requests for usage in usages),
        )

    return asyncio.run(read())


def reservations(redis_url: str) -> list[bytes]:
    with Redis.from_url(redis_url) as client:
        return [name for name in client.hkeys("sluice:{demo}") if name.startswith(b"r:")]


def ends_with_an_error(events: list[str]) -> bool:
    return bool(json.loads(events[-1])["error"]["code"] == "shutting_down")


def ended(server: ServerProcess) -> int | None:
    """Its exit status; and it said nothing that it should not have."""
    server.process.wait(PATIENCE)
    assert "Traceback" not in server.log.read_text()
    return server.process.returncode


def status(server: ServerProcess, path: str) -> int:
    return httpx.get(f"{server.url}{path}").status_code


def test_a_drain_loses_no_request_and_settles_all(tmp_path: Path, redis_url: str) -> None:
    with (
        running_server(tmp_path, *flags(tmp_path, redis_url=redis_url, drain_timeout=PATIENCE)) as server,
        connected(server) as idle,
    ):
        idle.send(request(server, completion(), "/v1/completions"))
        assert idle.reply().status == 200
        streams = Streams(server, NUM_STREAMS, max_tokens=MANY_TOKENS)
        streams.begun()
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: status(server, "/readyz") == 503)
        assert [status(server, path) for path in ("/livez", "/startupz", "/health", "/ping")] == [200, 200, 503, 503]
        idle.send(request(server, chat()))
        refused = idle.reply()
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert (refused.headers["connection"], refused.headers["x-should-retry"]) == ("close", "true")
        assert server.post("/v1/completions", **completion()).json()["error"]["code"] == "shutting_down"
        usages = []
        for events in streams.ends():
            assert events[-1] == "[DONE]"
            usages.append(json.loads(events[-2])["usage"])
        assert ended(server) == 0
    booked = ledger(redis_url)
    assert booked.requests == NUM_STREAMS + 1
    assert (
        booked.output_tokens == sum(usage["completion_tokens"] for usage in usages) + 4 == NUM_STREAMS * MANY_TOKENS + 4
    )
    assert booked.input_tokens % (NUM_STREAMS + 1) == 0
    assert booked.input_tokens // (NUM_STREAMS + 1) == usages[0]["prompt_tokens"]
    assert reservations(redis_url) == []


def test_a_request_that_outlasts_a_drain_ends_with_an_error_and_is_settled(tmp_path: Path, redis_url: str) -> None:
    with running_server(tmp_path, *flags(tmp_path, redis_url=redis_url, drain_timeout=0.2)) as server:
        streams = Streams(server, 8, max_tokens=1900)
        with connected(server) as buffered, connected(server) as sending:
            buffered.send(request(server, ENDLESS, "/v1/completions"))
            sending.send(request(server, chat())[:-20])
            streams.begun()
            server.process.send_signal(signal.SIGTERM)
            assert buffered.reply().error["code"] == "shutting_down"
            assert sending.reply().error["code"] == "shutting_down"
        received = 0
        for events in streams.ends():
            assert ends_with_an_error(events)
            received += sum(bool(json.loads(event).get("choices")) for event in events[:-1])
        assert ended(server) == 0
    assert reservations(redis_url) == []
    assert ledger(redis_url).output_tokens >= received > 0
    assert ledger(redis_url).requests == 9


def test_in_the_delay_a_server_is_not_ready_and_serves_and_a_second_signal_ends_it_now(
    tmp_path: Path, redis_url: str
) -> None:
    given = flags(tmp_path, redis_url=redis_url, drain_delay=3600, drain_timeout=3600)
    with running_server(tmp_path, *given) as server:
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: status(server, "/readyz") == 503)
        assert server.post("/v1/completions", **completion()).status_code == 200
        streams = Streams(server, 4, max_tokens=1900)
        streams.begun()
        server.process.send_signal(signal.SIGTERM)
        assert all(map(ends_with_an_error, streams.ends()))
        assert ended(server) == 0
    assert reservations(redis_url) == []
    assert ledger(redis_url).requests == 5


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path, redis_url: str) -> None:
    given = flags(tmp_path, redis_url=redis_url, drain_timeout=0.2, write_timeout=3600)
    with running_server(tmp_path, *given) as server, connected(server, receive_buffer=1024) as client:
        body = completion(prompt=["1, 2, 3,"] * 8, max_tokens=1900, ignore_eos=True, stream=True)
        client.send(request(server, body, "/v1/completions"))
        client.receive(1)
        server.process.send_signal(signal.SIGINT)
        assert ended(server) == 0
    assert reservations(redis_url) == []


def stream_until_broken(server: ServerProcess, begun: threading.Barrier) -> None:
    with suppress(httpx.TransportError), server.stream("/v1/completions", **ENDLESS) as reply:
        lines = reply.iter_lines()
        next(lines)
        begun.wait(PATIENCE)
        for _ in lines:
            pass


def test_reservations_of_a_killed_gateway_in_its_own_store_are_free_after_its_lease(tmp_path: Path) -> None:
    given = flags(tmp_path, quota_lease=3)
    with running_server(tmp_path, *given) as server:
        begun = threading.Barrier(4)
        with in_threads(*[partial(stream_until_broken, server, begun)] * 3):
            begun.wait(PATIENCE)
            assert server.remaining("concurrent_requests") == 100 - 3
            os.kill(server.process.pid, signal.SIGKILL)
    with running_server(tmp_path, *given) as server:
        eventually(lambda: server.answers() and server.remaining("concurrent_requests") == 100)
        assert server.remaining("tokens") < 10_000_000, "what was computed before the kill is not forgotten"


def test_a_wedged_device_ends_every_stream_and_the_process(tmp_path: Path, redis_url: str) -> None:
    given = flags(tmp_path, redis_url=redis_url, step_timeout=5)
    with running_server(tmp_path, *given, program="tests.gateway.wedging_server") as server:
        with server.stream("/v1/completions", **completion(ignore_eos=True, max_tokens=500)) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert json.loads(events[-1])["error"]["code"] == "internal_error"
        assert server.process.wait(PATIENCE) == 1
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    (report,) = [line for line in lines if line["level"] == "CRITICAL"]
    assert "wedging_server.py" in report["message"] and "threading.Event().wait()" in report["message"]
    assert reservations(redis_url) == []
    assert ledger(redis_url).output_tokens >= len(events) - 1 > 0

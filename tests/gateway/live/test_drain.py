"""A server that is told to stop: what it promised is kept or refused properly, and every token is accounted for."""

import asyncio
import json
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx
from redis import Redis

from quotas.reservation import Usage
from quotas.store.redis_store import RedisStore
from tests.gateway.raw_client import chat, completion, connected, request
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually, running_server

NUM_STREAMS = 16
POLICY = "tenants: {demo: {limits: {tokens: 10M/month, concurrent_requests: 100}}}"


def flags(directory: Path, redis_url: str, **more: object) -> list[str]:
    policy = directory / "policy.yaml"
    policy.write_text(POLICY)
    given = {"threads": 1, "policy": policy, "redis-url": redis_url} | more
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
        """The events of each."""
        with self._pool:
            return [result.result() for result in self._results]

    def _read(self) -> list[str]:
        body = completion(stream=True, ignore_eos=True, max_tokens=self._max_tokens)
        body["stream_options"] = {"include_usage": True}
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=self._server.headers, timeout=PATIENCE) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            events = [next(lines)]
            self._begun.wait(PATIENCE)
            return [*events, *lines]


def ledger(redis_url: str) -> Usage:
    """What the store has booked for the tenant today."""

    async def read() -> Usage:
        store = RedisStore.at(redis_url, 5.0)
        await store.connect()
        usages = (await store.usage("demo", datetime.now(UTC).date())).values()
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


def ended(server: ServerProcess) -> int | None:
    """Its exit status; and it said nothing that it should not have."""
    server.process.wait(PATIENCE)
    assert "Traceback" not in server.log.read_text()
    return server.process.returncode


def status(server: ServerProcess, path: str) -> int:
    return httpx.get(f"{server.url}{path}").status_code


def test_a_drain_loses_no_request_and_settles_all(tmp_path: Path, redis_url: str) -> None:
    with (
        running_server(tmp_path, *flags(tmp_path, redis_url, drain_timeout=PATIENCE)) as server,
        connected(server) as idle,
    ):
        idle.send(request(server, completion(), "/v1/completions"))
        assert idle.reply().status == 200
        streams = Streams(server, NUM_STREAMS, max_tokens=700)
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
    assert booked.output_tokens == sum(usage["completion_tokens"] for usage in usages) + 4 == NUM_STREAMS * 700 + 4
    assert booked.input_tokens % (NUM_STREAMS + 1) == 0
    assert booked.input_tokens // (NUM_STREAMS + 1) == usages[0]["prompt_tokens"]
    assert reservations(redis_url) == []


def test_what_a_drain_has_no_time_for_ends_with_an_error_and_is_settled(tmp_path: Path, redis_url: str) -> None:
    with running_server(tmp_path, *flags(tmp_path, redis_url, drain_timeout=0.2)) as server:
        streams = Streams(server, 8, max_tokens=1900)
        with connected(server) as buffered, connected(server) as sending:
            buffered.send(request(server, completion(max_tokens=1900, ignore_eos=True), "/v1/completions"))
            sending.send(request(server, chat())[:-20])
            streams.begun()
            server.process.send_signal(signal.SIGTERM)
            assert buffered.reply().error["code"] == "shutting_down"
            assert sending.reply().error["code"] == "shutting_down"
        received = 0
        for events in streams.ends():
            assert json.loads(events[-1])["error"]["code"] == "shutting_down"
            received += sum(bool(json.loads(event).get("choices")) for event in events[:-1])
        assert ended(server) == 0
    assert reservations(redis_url) == []
    assert ledger(redis_url).output_tokens >= received > 0
    assert ledger(redis_url).requests == 9


def test_in_the_delay_a_server_is_not_ready_and_serves_and_a_second_signal_ends_it_now(
    tmp_path: Path, redis_url: str
) -> None:
    given = flags(tmp_path, redis_url, drain_delay=3600, drain_timeout=3600)
    with running_server(tmp_path, *given) as server:
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: status(server, "/readyz") == 503)
        assert server.post("/v1/completions", **completion()).status_code == 200
        streams = Streams(server, 4, max_tokens=1900)
        streams.begun()
        server.process.send_signal(signal.SIGTERM)
        for events in streams.ends():
            assert json.loads(events[-1])["error"]["code"] == "shutting_down"
        assert ended(server) == 0
    assert reservations(redis_url) == []
    assert ledger(redis_url).requests == 5


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path, redis_url: str) -> None:
    given = flags(tmp_path, redis_url, drain_timeout=0.2, write_timeout=3600)
    with running_server(tmp_path, *given) as server, connected(server, receive_buffer=1024) as client:
        body = completion(prompt=["1, 2, 3,"] * 8, max_tokens=1900, ignore_eos=True, stream=True)
        client.send(request(server, body, "/v1/completions"))
        client.receive(1)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0
    assert reservations(redis_url) == []

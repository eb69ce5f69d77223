"""Deadlines and overload as clients meet them: a real server with one slot, kept busy."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.auth import new_key
from gateway.key_store import KeyStore
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually, running_server

POLICY = """
classes:
  hurried: {service_tiers: [priority], ttft: 50ms, when_late: refuse}
  usual: {aging: 2s}
  short: {service_tiers: [flex], aging: 4s, queue: {requests: 1}}
defaults: {default_class: usual}
tenants:
  patient: {}
  queued: {limits: {queued_requests: 1}}
"""


@dataclass
class Site:
    server: ServerProcess
    keys: dict[str, str]

    def send(self, client: httpx.Client, tenant: str = "patient", **changes: Any) -> httpx.Request:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"} | changes.pop("headers", {})
        body = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}]} | changes
        return client.build_request("POST", f"{self.server.url}/v1/chat/completions", json=body, headers=headers)

    def post(self, tenant: str = "patient", **changes: Any) -> httpx.Response:
        with httpx.Client(timeout=PATIENCE) as client:
            return client.send(self.send(client, tenant, **changes))

    @contextmanager
    def occupied(self, waiting: int = 0) -> Iterator[None]:
        """The slot is taken by a long answer, and so many more wait for it, until the block is left."""
        self._leave = False
        with httpx.Client(timeout=PATIENCE) as client, ExitStack() as open_streams:
            for _ in range(1 + waiting):
                thread = threading.Thread(target=self._stream, args=(client,))
                thread.start()
                open_streams.callback(thread.join)
            eventually(lambda: self.server.metric("vllm:num_requests_running") == 1, 10)
            eventually(lambda: self.server.metric("vllm:num_requests_waiting") == waiting, 10)
            try:
                yield
            finally:
                self._leave = True
        eventually(self.server.is_idle)

    def _stream(self, client: httpx.Client) -> None:
        request = self.send(client, max_tokens=1900, ignore_eos=True, stream=True)
        response = client.send(request, stream=True)
        for _ in response.iter_raw():
            if self._leave:
                break
        response.close()

    _leave: bool = False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("deadlines")
    (folder / "policy.yaml").write_text(POLICY)
    store, keys = KeyStore(folder / "state"), {}
    for tenant in ("patient", "queued"):
        keys[tenant], record = new_key(tenant, store.pepper())
        store.add(record)
    flags = ("--threads", "1", "--max-num-seqs", "1", "--policy", str(folder / "policy.yaml"))
    with running_server(folder, *flags) as server:
        site = Site(server, keys)
        for _ in range(3):
            site.post()  # so that something is known of how long things take
        yield site


def error_of(reply: httpx.Response) -> dict[str, Any]:
    return dict(reply.json()["error"])


def test_an_idle_machine_refuses_nobody_and_tells_its_estimate(site: Site) -> None:
    eventually(site.server.is_idle)
    reply = site.post(headers={"x-sluice-ttft-ms": "1"}, max_tokens=5)
    assert reply.status_code in (200, 504), "it may expire, but nobody says that it cannot be met"
    told = site.post(headers={"x-sluice-ttft-ms": "30000"}, max_tokens=5)
    assert 0 <= int(told.headers["x-sluice-estimate-ttft-ms"]) < 30_000


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_estimate(site: Site) -> None:
    with site.occupied(waiting=2):
        reply = site.post(headers={"x-sluice-ttft-ms": "20"})
    error = error_of(reply)
    assert (reply.status_code, error["type"], error["code"]) == (
        reply.status_code,
        "service_unavailable_error",
        "deadline_unmeetable",
    )
    assert reply.status_code in (429, 503) and error["estimate_ms"] > 20
    assert reply.headers["x-sluice-dropped-reason"] == "deadline"
    assert "x-should-retry" not in reply.headers, "the deadline counts from each attempt"
    assert 1000 <= int(reply.headers["retry-after-ms"]) <= 60_000


def test_a_moment_that_cannot_be_met_is_not_worth_a_retry(site: Site) -> None:
    with site.occupied(waiting=2):
        reply = site.post(headers={"x-sluice-deadline-at": "1700000000"})
    assert error_of(reply)["code"] == "deadline_unmeetable"
    assert reply.headers["x-should-retry"] == "false"


def test_a_class_may_refuse_what_would_be_late(site: Site) -> None:
    with site.occupied(waiting=2):
        assert error_of(site.post(service_tier="priority"))["code"] == "deadline_unmeetable"


def test_a_request_whose_time_is_over_ends_with_a_504(site: Site) -> None:
    late = {"x-sluice-deadline-ms": "300"}
    reply = site.post(headers=late, max_tokens=1900, ignore_eos=True)
    assert (reply.status_code, error_of(reply)["code"]) == (504, "deadline_exceeded")
    assert reply.headers["x-should-retry"] == "false"
    stream = site.post(headers=late, max_tokens=1900, ignore_eos=True, stream=True)
    assert stream.status_code == 200 and "[DONE]" not in stream.text
    assert '"code":"deadline_exceeded"' in stream.text.rstrip().split("\n\n")[-1]


def test_the_openai_clients_own_timeout_is_a_deadline(site: Site) -> None:
    url = f"{site.server.url}/v1"
    patience = httpx.Timeout(PATIENCE, read=0.4)
    client = openai.OpenAI(base_url=url, api_key=site.keys["patient"], max_retries=0, timeout=patience)
    with site.occupied(waiting=2), pytest.raises((openai.InternalServerError, openai.APITimeoutError)) as raised:
        client.chat.completions.create(model="embedded", messages=[{"role": "user", "content": "Count from 3 to 12."}])
    assert isinstance(raised.value, openai.InternalServerError), "it was told before it gave up by itself"


def test_a_class_whose_queue_is_full_is_ours_and_a_tenants_own_is_its(site: Site) -> None:
    asks = [{"service_tier": "flex"}, {"tenant": "queued"}]
    threads = [threading.Thread(target=site.post, kwargs={**ask, "max_tokens": 1}) for ask in asks]
    with site.occupied():
        for thread in threads:
            thread.start()
        eventually(lambda: site.server.metric("vllm:num_requests_waiting") == 2, 10)
        ours, its = site.post(service_tier="flex"), site.post("queued")
    for thread in threads:
        thread.join()
    assert (ours.status_code, error_of(ours)["code"]) == (503, "server_is_overloaded")
    assert (its.status_code, error_of(its)["code"]) == (429, "concurrency_exceeded")
    assert "requests would wait, at most 1 may" in error_of(ours)["message"]
    assert all(int(reply.headers["retry-after-ms"]) >= 1000 for reply in (ours, its))

"""Deadlines and overload as clients meet them: a real server with one slot, kept busy."""

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.gateway.busy_site import Site, busy_site
from tests.gateway.server_process import PATIENCE, eventually
from tests.gateway.tenant_site import error_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with busy_site(tmp_path_factory.mktemp("deadlines")) as site:
        yield site


def test_an_idle_machine_refuses_nobody_and_tells_its_estimate(site: Site) -> None:
    eventually(site.server.is_idle)
    reply = site.post(headers={"x-sluice-ttft-ms": "1"}, max_tokens=5)
    assert reply.status_code in (200, 504), "it may expire, but nobody says that it cannot be met"
    told = site.post(headers={"x-sluice-ttft-ms": "30000"}, max_tokens=5)
    first, last = (int(told.headers[f"x-sluice-estimate-{name}"]) for name in ("ttft-ms", "ms"))
    assert 0 <= first <= last and first < 30_000


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


class WaitingTransport(httpx.HTTPTransport):
    """Waits as long as a busy machine needs for the answer to a client that says it will not."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "timeout": httpx.Timeout(PATIENCE).as_dict()}
        return super().handle_request(request)


def test_the_openai_clients_own_timeout_is_a_deadline(site: Site) -> None:
    url = f"{site.server.url}/v1"
    timeout = httpx.Timeout(PATIENCE, read=0.4)
    waiting = httpx.Client(transport=WaitingTransport())
    client = openai.OpenAI(
        base_url=url, api_key=site.keys["patient"], max_retries=0, timeout=timeout, http_client=waiting
    )
    with client, site.occupied(waiting=2), pytest.raises(openai.APIError) as raised:
        client.chat.completions.create(
            model="embedded",
            messages=[{"role": "user", "content": "Count from 3 to 12."}],
            max_tokens=1900,
            extra_body={"ignore_eos": True},
        )
    assert isinstance(raised.value, openai.APIStatusError), "it was told before it gave up by itself"
    assert raised.value.code == "deadline_unmeetable"
    assert raised.value.status_code in (429, 503), "429 where what its own tenant has waiting is the cause"


def test_a_class_whose_queue_is_full_is_ours_and_a_tenants_own_is_its(site: Site) -> None:
    asks = [{"service_tier": "flex"}, {"tenant": "queued"}]
    threads = [threading.Thread(target=site.post, kwargs={**ask, "max_tokens": 1}) for ask in asks]
    with site.occupied():
        for thread in threads:
            thread.start()
        eventually(lambda: site.server.metric("vllm:num_requests_waiting") == 2)
        ours, its = site.post(service_tier="flex"), site.post("queued")
    for thread in threads:
        thread.join()
    assert (ours.status_code, error_of(ours)["code"]) == (503, "server_is_overloaded")
    assert (its.status_code, error_of(its)["code"]) == (429, "concurrency_exceeded")
    assert "requests would wait, at most 1 may (classes.short.queue.requests)" in error_of(ours)["message"]
    assert all(int(reply.headers["retry-after-ms"]) >= 1000 for reply in (ours, its))

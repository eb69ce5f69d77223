"""The retries of the official client, against a live server: it comes back when that helps, and only then.

The client's pauses are made by the test: it sees for how long the client would have waited, and clears the way instead.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.busy_site import Site, busy_site
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually, running_server

MESSAGES: Any = [{"role": "user", "content": "Count from 3 to 12."}]
KEY = "sk-sluice-the-same-for-every-replica"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with busy_site(tmp_path_factory.mktemp("retries")) as site:
        yield site


@dataclass
class Pauses:
    """Stands in for `time` in the client."""

    meanwhile: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.meanwhile()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr("openai._base_client.time", pauses)
    return pauses


class Attempts(httpx.HTTPTransport):
    """Every attempt with its answer; each goes to the next of `servers`, the last of them takes the rest."""

    def __init__(self, *servers: ServerProcess) -> None:
        super().__init__()
        self.servers = servers
        self.requests: list[httpx.Request] = []
        self.responses: list[httpx.Response] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        server = self.servers[min(len(self.requests), len(self.servers) - 1)]
        request.url = request.url.copy_with(port=server.port)
        self.requests.append(request)
        self.responses.append(super().handle_request(request))
        return self.responses[-1]

    def header(self, name: str) -> list[str | None]:
        return [request.headers.get(name) for request in self.requests]

    @property
    def statuses(self) -> list[int]:
        return [response.status_code for response in self.responses]

    @property
    def told(self) -> list[float]:
        """Seconds after which those refused were told to come back."""
        return [float(response.headers["retry-after-ms"]) / 1000 for response in self.responses[:-1]]


def client(attempts: Attempts, key: str, **options: Any) -> openai.OpenAI:
    """As the package makes it, with its own number of retries."""
    http = httpx.Client(transport=attempts)
    url = f"{attempts.servers[0].url}/v1"
    return openai.OpenAI(base_url=url, api_key=key, http_client=http, **({"timeout": PATIENCE} | options))


def ask(site: Site, attempts: Attempts, tenant: str = "patient", **options: Any) -> str | None:
    timeout = options.pop("timeout", PATIENCE)
    with client(attempts, site.keys[tenant], timeout=timeout) as api:
        reply = api.chat.completions.create(model="embedded", messages=MESSAGES, temperature=0, **options)
    return reply.choices[0].message.content


def assert_came_back_once(attempts: Attempts, pauses: Pauses, status: int) -> None:
    assert attempts.statuses == [status, 200]
    assert attempts.header("x-stainless-retry-count") == ["0", "1"]
    assert pauses.seconds == attempts.told, "it waits as long as it is told"
    assert 1 <= pauses.seconds[0] <= 60


@pytest.mark.parametrize(("tenant", "tier", "status"), [("queued", "default", 429), ("patient", "flex", 503)])
def test_a_full_queue_is_tried_again_after_the_time_that_was_told(
    site: Site, pauses: Pauses, tenant: str, tier: str, status: int
) -> None:
    """429 for the tenant's own queue, 503 for that of the class."""
    attempts = Attempts(site.server)
    pauses.meanwhile = site.vacate
    waiter = threading.Thread(target=site.post, args=(tenant,), kwargs={"service_tier": tier, "max_tokens": 1})
    with site.occupied():
        waiter.start()
        eventually(lambda: site.server.metric("vllm:num_requests_waiting") == 1)
        assert ask(site, attempts, tenant, service_tier=tier)
    waiter.join()
    assert_came_back_once(attempts, pauses, status)


def test_a_deadline_that_counts_from_each_attempt_is_tried_again(site: Site, pauses: Pauses) -> None:
    attempts = Attempts(site.server)
    pauses.meanwhile = site.vacate
    with site.occupied(waiting=8):
        told = site.post(headers={"x-sluice-ttft-ms": "1"}).json()["error"]["estimate_ms"]
        assert ask(site, attempts, extra_headers={"x-sluice-ttft-ms": str(told / 2)})
    assert attempts.responses[0].headers["x-sluice-dropped-reason"] == "deadline"
    assert attempts.statuses[0] in (429, 503)
    assert_came_back_once(attempts, pauses, attempts.statuses[0])


def test_the_clients_timeout_is_read_and_what_it_could_not_wait_for_tried_again(site: Site, pauses: Pauses) -> None:
    attempts = Attempts(site.server)
    pauses.meanwhile = site.vacate
    with site.occupied(waiting=2):
        told = site.post(headers={"x-sluice-deadline-ms": "1"}).json()["error"]["estimate_ms"]
        patience = told / 2000
        assert ask(site, attempts, timeout=httpx.Timeout(PATIENCE, read=patience))
    assert attempts.header("x-stainless-read-timeout") == [str(patience)] * 2
    assert attempts.responses[0].headers["x-sluice-dropped-reason"] == "deadline"
    assert_came_back_once(attempts, pauses, attempts.statuses[0])
    assert int(attempts.responses[1].headers["x-sluice-estimate-ms"]) >= 0


def test_a_moment_that_has_passed_is_not_tried_again(site: Site, pauses: Pauses) -> None:
    attempts = Attempts(site.server)
    with site.occupied(waiting=2), pytest.raises(openai.APIStatusError) as refusal:
        ask(site, attempts, extra_headers={"x-sluice-deadline-at": "1700000000"})
    assert refusal.value.code == "deadline_unmeetable"
    assert len(attempts.requests) == 1 and pauses.seconds == []


def test_a_spent_budget_is_not_tried_again(site: Site, pauses: Pauses) -> None:
    assert ask(site, Attempts(site.server), "spent")
    attempts = Attempts(site.server)
    with pytest.raises(openai.RateLimitError) as refusal:
        ask(site, attempts, "spent")
    assert refusal.value.code == "insufficient_quota"
    assert len(attempts.requests) == 1 and pauses.seconds == []


def test_who_is_refused_again_and_again_gives_up_after_two_retries(site: Site, pauses: Pauses) -> None:
    attempts = Attempts(site.server)
    with site.occupied(waiting=2), pytest.raises(openai.APIStatusError) as refusal:
        ask(site, attempts, extra_headers={"x-sluice-ttft-ms": "20"})
    assert refusal.value.code == "deadline_unmeetable"
    assert attempts.header("x-stainless-retry-count") == ["0", "1", "2"]
    assert len(pauses.seconds) == 2


def test_what_a_server_that_shuts_down_cannot_end_is_done_by_another(tmp_path: Path, pauses: Pauses) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    flags = ("--threads", "1", "--demo-key", KEY, "--drain-timeout", "0")
    one.mkdir()
    other.mkdir()
    answers: list[str] = []
    with running_server(one, *flags) as leaving, running_server(other, *flags) as staying:
        attempts = Attempts(leaving, staying)

        def converse() -> None:
            with client(attempts, KEY) as api:
                reply = api.completions.create(
                    model="embedded", prompt="1, 2,", max_tokens=1500, extra_body={"ignore_eos": True}
                )
                answers.append(reply.choices[0].finish_reason)

        talk = threading.Thread(target=converse)
        talk.start()
        eventually(lambda: leaving.metric("vllm:num_requests_running") == 1)
        leaving.process.send_signal(signal.SIGTERM)
        talk.join()
    assert answers == ["length"] and attempts.statuses == [503, 200]
    assert attempts.responses[0].headers["x-should-retry"] == "true" and pauses.seconds == [1.0]

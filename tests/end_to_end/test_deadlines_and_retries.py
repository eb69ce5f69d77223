"""A busy server with one slot: deadlines and overload as clients meet them, and how the official client comes back."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.busy_site import Site, busy_site
from tests.gateway.server_process import BODY, PATIENCE, ServerProcess, eventually, in_threads, running_server
from tests.gateway.tenant_site import error_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with busy_site(tmp_path_factory.mktemp("deadlines")) as site:
        yield site


def test_an_idle_machine_refuses_what_it_cannot_keep_by_far_alone_and_tells_its_estimate(site: Site) -> None:
    eventually(site.server.is_idle)
    reply = site.post(headers={"x-sluice-ttft-ms": "1"}, max_tokens=5)
    if reply.status_code not in (200, 504):  # which of them depends on the machine
        assert error_of(reply)["code"] == "deadline_unmeetable" and error_of(reply)["estimate_ms"] > 1
    told = site.post(headers={"x-sluice-ttft-ms": "240000"}, max_tokens=5)
    first, last = (int(told.headers[f"x-sluice-estimate-{name}"]) for name in ("ttft-ms", "ms"))
    assert 0 <= first <= last and first < 30_000


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_estimate(site: Site) -> None:
    with site.occupied(waiting=2):
        reply = site.post(headers={"x-sluice-ttft-ms": "1"})  # less than a step, even where the slot is soon free
    error = error_of(reply)
    assert (error["type"], error["code"]) == ("service_unavailable_error", "deadline_unmeetable")
    assert reply.status_code in (429, 503) and error["estimate_ms"] > 1
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
    late = {"x-sluice-deadline-ms": "1000"}  # in which any machine begins, and none ends
    reply = site.post(headers=late, max_tokens=1900, ignore_eos=True)
    assert (reply.status_code, error_of(reply)["code"]) == (504, "deadline_exceeded")
    assert reply.headers["x-should-retry"] == "false"
    stream = site.post(headers=late, max_tokens=1900, ignore_eos=True, stream=True)
    assert stream.status_code == 200 and "[DONE]" not in stream.text
    assert '"code":"deadline_exceeded"' in stream.text.rstrip().split("\n\n")[-1]


def test_anthropics_clients_are_told_of_time_and_limits_in_their_own_words(site: Site) -> None:
    """503 is 529 there."""

    def post(tenant: str = "patient", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        key = {"x-api-key": site.keys[tenant], **(headers or {})}
        body = BODY | {"max_tokens": 5, **fields}
        return httpx.post(f"{site.server.url}/v1/messages", json=body, headers=key, timeout=PATIENCE)

    def told(reply: httpx.Response) -> tuple[int, str, str]:
        assert reply.json()["type"] == "error"
        return reply.status_code, error_of(reply)["type"], error_of(reply)["code"]

    late = {"x-sluice-deadline-ms": "1000"}  # in which any machine begins, and none ends
    endless = {"type": "array", "items": {"type": "string", "minLength": 99}, "minItems": 99}
    long: Any = {"max_tokens": 1900, "output_config": {"format": {"type": "json_schema", "schema": endless}}}
    assert told(post(headers=late, **long)) == (504, "timeout_error", "deadline_exceeded")
    stream = post(headers=late, stream=True, **long)
    assert stream.text.rstrip().split("\n\n")[-1].startswith("event: error\n") and "message_stop" not in stream.text
    replies = [post("exhausted") for _ in range(2)]
    assert (replies[0].status_code, told(replies[1])) == (200, (429, "rate_limit_error", "insufficient_quota"))
    with site.occupied(waiting=2):
        reply = post(headers={"x-sluice-ttft-ms": "1"})
    assert told(reply) in (
        (529, "overloaded_error", "deadline_unmeetable"), (429, "rate_limit_error", "deadline_unmeetable")
    )  # fmt: skip
    assert 1000 <= int(reply.headers["retry-after-ms"]) <= 60_000


class WaitingTransport(httpx.HTTPTransport):
    """Waits as long as a busy machine needs for the answer to a client that says it will not."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "timeout": httpx.Timeout(PATIENCE).as_dict()}
        return super().handle_request(request)


def test_the_openai_clients_own_timeout_is_a_deadline(site: Site) -> None:
    timeout = httpx.Timeout(PATIENCE, read=0.02)
    client = site.client("patient", timeout=timeout, http_client=httpx.Client(transport=WaitingTransport()))
    with client, site.occupied(waiting=2), pytest.raises(openai.APIError) as raised:
        client.chat.completions.create(**BODY, max_tokens=1900, extra_body={"ignore_eos": True})
    assert isinstance(raised.value, openai.APIStatusError), "it was told before it gave up by itself"
    assert raised.value.code == "deadline_unmeetable"
    assert raised.value.status_code in (429, 503), "429 where what its own tenant has waiting is the cause"


def test_a_class_whose_queue_is_full_is_ours_and_a_tenants_own_is_its(site: Site) -> None:
    asks = partial(site.post, service_tier="flex", max_tokens=1), partial(site.post, "queued", max_tokens=1)
    with site.occupied(), in_threads(*asks):
        eventually(lambda: site.server.metric("vllm:num_requests_waiting") == 2)
        ours, its = site.post(service_tier="flex"), site.post("queued")
        site.vacate()
    assert (ours.status_code, error_of(ours)["code"]) == (503, "server_is_overloaded")
    assert (its.status_code, error_of(its)["code"]) == (429, "concurrency_exceeded")
    assert "requests would wait, at most 1 may (classes.short.queue.requests)" in error_of(ours)["message"]
    assert all(int(reply.headers["retry-after-ms"]) >= 1000 for reply in (ours, its))


KEY = "sk-sluice-the-same-for-every-replica"


@dataclass
class Pauses:
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


class Attempts(WaitingTransport):
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
        reply = api.chat.completions.create(**BODY, temperature=0, **options)
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
    with site.occupied(), in_threads(partial(site.post, tenant, service_tier=tier, max_tokens=1)):
        eventually(lambda: site.server.metric("vllm:num_requests_waiting") == 1)
        assert ask(site, attempts, tenant, service_tier=tier)
    assert_came_back_once(attempts, pauses, status)


def test_a_deadline_that_counts_from_each_attempt_is_tried_again(site: Site, pauses: Pauses) -> None:
    attempts = Attempts(site.server)
    pauses.meanwhile = site.vacate
    with site.occupied(waiting=8):
        told = site.post(headers={"x-sluice-ttft-ms": "1"}).json()["error"]["estimate_ms"]
        assert ask(site, attempts, extra_headers={"x-sluice-ttft-ms": str(told * 3 / 4)})
    assert attempts.responses[0].headers["x-sluice-dropped-reason"] == "deadline"
    assert attempts.statuses[0] in (429, 503)
    assert_came_back_once(attempts, pauses, attempts.statuses[0])


def test_the_clients_timeout_is_read_and_what_it_could_not_wait_for_tried_again(site: Site, pauses: Pauses) -> None:
    pauses.meanwhile = site.vacate
    answered = None
    while answered is None:
        attempts = Attempts(site.server)
        pauses.seconds.clear()
        with site.occupied(waiting=8):
            told = site.post(headers={"x-sluice-deadline-ms": "1"}).json()["error"]["estimate_ms"]
            patience = told / 2000
            with suppress(openai.InternalServerError):  # a busy machine is late though it serves nobody else
                answered = ask(site, attempts, timeout=httpx.Timeout(PATIENCE, read=patience))
        assert answered or attempts.statuses[-1] == 504
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


def test_a_client_refused_repeatedly_gives_up_after_two_retries(site: Site, pauses: Pauses) -> None:
    attempts = Attempts(site.server)
    with site.occupied(waiting=2), pytest.raises(openai.APIStatusError) as refusal:
        ask(site, attempts, extra_headers={"x-sluice-ttft-ms": "1"})
    assert refusal.value.code == "deadline_unmeetable"
    assert attempts.header("x-stainless-retry-count") == ["0", "1", "2"]
    assert len(pauses.seconds) == 2


def test_a_request_that_a_server_cannot_end_at_shutdown_is_done_by_another(tmp_path: Path, pauses: Pauses) -> None:
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

        with in_threads(converse):
            eventually(lambda: leaving.metric("vllm:num_requests_running") == 1)
            leaving.process.send_signal(signal.SIGTERM)
    assert answers == ["length"] and attempts.statuses == [503, 200]
    assert attempts.responses[0].headers["x-should-retry"] == "true" and pauses.seconds == [1.0]

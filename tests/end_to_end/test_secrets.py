"""No key is in a log, a span or a metric, and no prompt or output of a tenant that did not consent to it."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.gateway.raw_client import chat, completion, connected, request
from tests.gateway.server_process import PATIENCE, ServerProcess, running_server
from tests.gateway.telemetry.otlp_receiver import otlp_receiver

SECRET = "planted-7f3a"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", chat(f"Count from 3 to 12. {SECRET}")),
    ("chat/completions", chat(f"{SECRET} " * 2000)),
    ("chat/completions", chat(stop=[SECRET], user=SECRET, metadata={"of": SECRET})),
    ("chat/completions", chat(stream=True, max_tokens=40)),
    ("chat/completions", {"model": "embedded", "messages": [{"role": SECRET, "content": SECRET}]}),
    ("chat/completions", {"model": "embedded", "messages": SECRET}),
    ("chat/completions", chat(temperature=SECRET)),
    ("chat/completions", chat(**{SECRET: SECRET})),
    ("completions", completion(prompt=[SECRET] * 3, n=2)),
    ("completions", completion(prompt=SECRET, max_tokens=10**6)),
    ("completions", completion(prompt=SECRET, logit_bias={SECRET: 1})),
]
HEADERS = {"cookie": SECRET, "user-agent": SECRET, "baggage": f"a={SECRET}", "x-forwarded-for": SECRET, "x-own": SECRET}
ROUNDS = 6
PAGES = ("overview", "tenants", "requests", "queue", "kv", "policy", "refusals", "usage", "audit", "diagnosis", "keys")


@dataclass
class Seen:
    """What a server emitted while it was used, and what it must not have."""

    emitted: dict[str, str]
    key: str
    admin_key: str
    pepper: str
    outputs: list[str]
    num_misplaced: int


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("secrets")
    with otlp_receiver() as receiver:
        flags = ["--threads=1", "--log-level=debug", "--trace-sample-ratio=1", "--trace-max-per-second=10000"]
        flags += ["--refused-per-second=10000", "--otlp-logs=on", f"--event-log={directory / 'events'}"]
        with running_server(directory, *flags, f"--otlp-endpoint={receiver.grpc_endpoint}") as server:
            num_misplaced = misplace(server)
            outputs = use(server)
            metrics, admin = server.scrape().text, "".join(json.dumps(server.admin(page)) for page in PAGES)
            recent = server.admin("requests")["recent"]
            admin += "".join(json.dumps(server.admin(f"requests/{one['id']}")) for one in recent)
        emitted = {
            "log": server.log.read_text(),
            "metrics": metrics,
            "admin": admin,
            "events": (directory / "events").read_text(),
            "telemetry": b"".join(r.SerializeToString() for r in receiver.requests).decode("latin-1"),
        }
    pepper = (directory / "state" / "pepper").read_bytes().hex()
    return Seen(emitted, server.key, server.admin_key, pepper, outputs, num_misplaced)


def use(server: ServerProcess) -> list[str]:
    """Every request several times at once, with a good key, with a bad one, and broken; the texts that came."""
    url = f"{server.url}/v1"
    with httpx.Client(timeout=PATIENCE, headers=HEADERS) as client, ThreadPoolExecutor(8) as pool:

        def post(path: str, body: dict[str, Any], key: str) -> httpx.Response:
            address = f"{url}/{path}?api_key={SECRET}"
            return client.post(address, json=body, headers={"authorization": f"Bearer {key}"})

        replies = [pool.submit(post, path, body, server.key) for path, body in REQUESTS * ROUNDS]
        replies += [pool.submit(post, *REQUESTS[0], f"sk-sluice-{SECRET}") for _ in range(ROUNDS)]
        answers = [reply.result() for reply in replies]
    assert {answer.status_code for answer in answers} == {200, 400, 401}
    with connected(server) as raw:
        raw.send(request(server, b'{"model": "' + SECRET.encode(), content_length="9000"))
        raw.shut()
        raw.is_closed()
    whole = [answer for answer in answers if answer.headers["content-type"] == "application/json"]
    choices = [choice for answer in whole for choice in answer.json().get("choices", [])]
    return [(choice.get("message", {}).get("content") or choice.get("text", ""))[:24] for choice in choices]


def misplace(server: ServerProcess) -> int:
    """Requests whose clients have put their key where it does not belong, which no answer tells; how many are of v1."""
    key, headers = server.key, {"authorization": f"Bearer {server.key}"}
    places: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
        ("GET", f"/v1/{key}", {}, {}),
        ("GET", f"/{key}/v1/models?api_key={key}", {}, {}),
        ("GET", f"/v1/models/{key}", {}, {}),
        ("GET", f"/v1/models/{key.replace('-', '%2D')}", {}, {}),
        ("GET", f"/v1/models/{key.replace('-', '%252D')}", {}, {}),
        ("DELETE", f"/v1/chat/completions/{key}", {}, {}),
        ("GET", "/v1/models", {}, {"x-request-id": key}),
        ("GET", "/v1/models", {}, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": f"a={key}"}),
        ("POST", "/v1/chat/completions", chat(model=key), {}),
        ("POST", "/v1/chat/completions", chat(service_tier=key), {}),
        ("POST", "/v1/chat/completions", chat(**{key: 1}), {}),
        ("POST", "/v1/chat/completions", chat(tool_choice={"type": "function", "function": {"name": key}}), {}),
        ("POST", "/v1/chat/completions", chat(max_tokens=1, user=key, stop=[key]), {}),
        ("POST", "/v1/completions", completion(model=f"openai/{key}"), {}),
        ("POST", "/tokenize", {"model": key, "prompt": "a"}, {}),
    ]
    for method, path, body, more in places:
        reply = httpx.request(method, server.url + path, json=body or None, headers=headers | more, timeout=PATIENCE)
        told = reply.text + repr(reply.headers)
        assert reply.status_code < 500 and key not in told and key.replace("-", "%2D") not in told
    return sum(path.startswith("/v1/") for _, path, _, _ in places)


@pytest.mark.parametrize("where", ["log", "metrics", "telemetry", "admin", "events"])
def test_nothing_planted_is_found(seen: Seen, where: str) -> None:
    text = seen.emitted[where]
    assert "embedded" in text or where == "events", "it is what was emitted"
    for secret in (SECRET, seen.key, seen.key.replace("-", "%2D"), seen.admin_key, seen.pepper):
        assert secret and secret not in text


@pytest.mark.parametrize("where", ["log", "metrics", "telemetry"])
def test_no_output_is_found(seen: Seen, where: str) -> None:
    outputs = [output for output in seen.outputs if len(output) >= 12]
    assert len(outputs) > ROUNDS
    assert not [output for output in outputs if output in seen.emitted[where]]


def test_the_log_has_a_line_for_every_request(seen: Seen) -> None:
    assert seen.emitted["log"].count('"path":"/v1/') == (len(REQUESTS) + 1) * ROUNDS + 1 + seen.num_misplaced

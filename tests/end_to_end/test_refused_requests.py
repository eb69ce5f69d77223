"""Refused requests at a real server: checks made, checks skipped, and tenants undisturbed."""

import json
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.gateway.raw_client import chat
from tests.gateway.server_process import PATIENCE, bearer, eventually
from tests.gateway.tenant_site import TenantSite, make_keys, site_fixture, tenant_site

POLICY = """
tenants:
  spent: {limits: {requests: {rate: 1/h, burst: 1}}}
  counted: {limits: {requests: {rate: 1/h, burst: 3}}}
  broken: {}
  good: {}
"""
CHAT = chat("Hi.", max_tokens=1)
PAGE = "https://app.example"
RATE = 2  # refused requests a second


class Site(TenantSite):
    def send(self, tenant: str, body: object = CHAT, path: str = "/v1/chat/completions") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url, headers = self.server.url + path, self.authorization(tenant)
        return httpx.post(url, content=content, headers=headers, timeout=PATIENCE)


FLAGS = ("--refused-per-second", str(RATE), "--cors-origins", PAGE, "--public-models", "on")
site = site_fixture(Site, POLICY, *FLAGS)


def test_models_that_are_public_need_no_key_but_none_that_is_wrong(site: Site) -> None:
    for path in ("/v1/models", "/v1/models/embedded"):
        url = site.server.url + path
        assert httpx.get(url).json() == site.get("good", path).json()
        wrong = httpx.get(url, headers={"authorization": "Bearer sk-sluice-wrong"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(site.server.url + "/v1/models/other").status_code == 404
    assert httpx.get(site.server.url + "/v1/limits").status_code == 401


@pytest.mark.parametrize("path", ["/v1/loads", "/server_info", "/get_server_info", "/model_info", "/get_model_info"])
def test_others_routers_are_told_what_is_public_and_nothing_of_a_tenant(site: Site, path: str) -> None:
    reply = httpx.get(f"{site.server.url}{path}?include=core,queues")
    assert reply.status_code == 200
    assert set(reply.json()) == set(site.get("good", path).json())
    assert not any(name in reply.text for name in ("good", "broken", str(Path.home())))
    assert httpx.get(site.server.url + path, headers={"authorization": "Bearer sk-sluice-wrong"}).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b"not json"),
        ("/v1/chat/completions", b'{"model": "none", "messages": [{"role": "user", "content": "Hi."}]}'),
        ("/v1/completions", b"{}"),
        ("/tokenize", b"{}"),
        ("/detokenize", b"not json"),
        ("/tokenize", b'{"prompt": "Hi."}'),
    ],
)
def test_a_tenant_whose_limit_is_spent_is_told_so_for_any_body(site: Site, path: str, body: bytes) -> None:
    site.send("spent")
    reply = site.send("spent", body, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert reply.json()["error"]["limit"] == "requests/h"
    assert 0 < int(reply.headers["retry-after"]) <= 60
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_web_page_of_an_allowed_origin_may_call_and_reads_why_it_was_refused(site: Site) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    url, paths = site.server.url, ("/v1/chat/completions", "/v1/models", "/nowhere")
    for path in paths:
        reply = httpx.options(url + path, headers={"origin": PAGE, **asks})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (204, PAGE)
        assert reply.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
        assert (
            "access-control-allow-origin"
            not in httpx.options(url + path, headers=asks | {"origin": PAGE + "x"}).headers
        )
    for path in paths[1:]:
        reply = site.get("good", path, origin=PAGE)
        assert (reply.headers["access-control-allow-origin"], reply.headers["access-control-expose-headers"]) == (
            PAGE,
            "*",
        )
        assert reply.headers["vary"] == "Origin" and "x-request-id" in reply.headers
    assert "access-control-allow-origin" not in site.get("good", "/v1/models").headers
    admin = site.server.admin_url
    assert "access-control-allow-origin" not in httpx.options(admin + "/", headers={"origin": PAGE, **asks}).headers


def test_a_tenant_whose_limit_is_spent_is_told_so_before_its_body_has_come(site: Site) -> None:
    site.send("spent")
    assert site.send("spent").status_code == 429
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {site.keys['spent']}\r\n"
    with socket.create_connection(("127.0.0.1", site.server.port), PATIENCE) as client:
        client.sendall(head.encode() + b"content-length: 1000\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 429")


def test_a_call_of_the_tokenizer_counts_as_a_request_unless_it_is_refused(site: Site) -> None:
    for path, body, status in (
        ("/tokenize", {"prompt": "Hi."}, 200),
        ("/tokenize", {"prompt": 7}, 400),
        ("/detokenize", {"tokens": [5]}, 200),
        ("/detokenize", {"tokens": [-5]}, 400),
        ("/tokenize", {"messages": CHAT["messages"]}, 200),
        ("/detokenize", {"tokens": [5]}, 429),
        ("/tokenize", {"prompt": "Hi."}, 429),
    ):
        assert site.send("counted", body, path).status_code == status


def test_a_key_whose_requests_are_refused_too_often_is_answered_unread_and_others_are_served(site: Site) -> None:
    large = b"[" + b"{}," * 2**16
    assert site.send("broken", b"not json").status_code == 400
    assert site.send("broken", large).status_code == 413
    while (reply := site.send("broken", large)).status_code == 413:
        pass
    assert reply.status_code == 429
    assert reply.headers["x-sluice-dropped-reason"] == "refused_rate"
    assert int(reply.headers["retry-after"]) >= 1
    assert "of your API key were refused" in reply.json()["error"]["message"]
    assert site.send("good").status_code == 200


HOSTILE = {  # heads behind the key, and what comes of a body
    "a huge body that is announced": (b"content-length: 10737418240", b"{"),
    "a body that is coded": (b"content-encoding: gzip\r\ncontent-length: 4000000", b"x"),
    "no JSON": (b"content-length: 3", b"no!"),
    "too many elements": (b"content-length: 4000000", b"[" + b"{}," * 2**16),
    "a wrong field": (b"content-length: 2", b"{}"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_refusals_of_one_key_keep_no_other_key_of_its_tenant_waiting(site: Site, kind: str) -> None:
    head, body = HOSTILE[kind]
    bad, good = keys = [make_keys(site.store.directory, "broken")["broken"] for _ in range(2)]
    limits = f"{site.server.url}/v1/limits"
    eventually(lambda: all(httpx.get(limits, headers=bearer(key)).is_success for key in keys))
    start = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bad}\r\n"
    with ExitStack() as stack:
        address = ("127.0.0.1", site.server.port)
        clients = [stack.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(20 * RATE)]
        for client in clients:
            client.sendall(start.encode() + head + b"\r\n\r\n" + body)
        assert clients[0].recv(100).startswith(b"HTTP/1.1 4")
        reply = httpx.post(f"{site.server.url}/v1/chat/completions", json=CHAT, headers=bearer(good), timeout=PATIENCE)
        assert reply.status_code == 200
        assert httpx.get(f"{site.server.url}/nowhere", headers=bearer(good)).status_code == 404
        clients[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # its own refusal has not waited behind those of the other key
            clients[-1].recv(100)


def test_a_refusal_that_is_delayed_makes_room_for_a_request(tmp_path: Path) -> None:
    flags = ("--refused-per-second", "1", "--max-connections", "16", "--max-body-bytes", "4MiB")
    with tenant_site(Site, tmp_path, "tenants: {bad: {}, good: {}}", *flags) as site, ExitStack() as stack:
        start = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {site.keys['bad']}\r\n"
        address = ("127.0.0.1", site.server.port)
        assert site.send("bad", b"[" + b"{}," * 2**19).status_code == 413  # the next refusals are delayed by seconds
        eventually(lambda: site.server.metric("sluice_connections") == 0)  # or it would make room in their place
        for _ in range(40):
            client = stack.enter_context(socket.create_connection(address, PATIENCE))
            client.sendall(start.encode() + b"content-length: 2\r\n\r\n{}")
        eventually(lambda: site.server.metric("sluice_connections_closed_total") >= 24)
        assert site.server.metric("sluice_connections") == 16
        assert site.send("good").status_code == 200


def test_a_good_key_is_served_beside_a_hundred_bad_ones_at_its_address(site: Site) -> None:
    request = b"GET /v1/limits HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n"
    with ExitStack() as stack:
        address = ("127.0.0.1", site.server.port)
        clients = [stack.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(40 * RATE)]
        for client in clients:
            client.sendall(request)
        assert site.send("good").status_code == 200
        clients[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):  # it waits behind the others
            clients[-1].recv(100)
        assert clients[0].recv(100).startswith(b"HTTP/1.1 401")

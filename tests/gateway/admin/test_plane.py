"""The admin port of a real gateway: what an admin sees and does, and what everyone else gets."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admin.admins import AdminStore, Role
from gateway.admin.kv_map import Use
from gateway.settings.machine import ADMIN_CONNECTIONS
from gateway.tenants.auth import new_key
from tests.gateway.raw_client import RawClient, chat, completion, connected, request
from tests.gateway.server_process import PATIENCE, bearer, eventually, in_threads, running_server
from tests.gateway.tenant_site import TenantSite, tenant_site

POLICY = """
classes:
  fast: {service_tiers: [priority]}
  usual: {aging: 2s}
defaults: {default_class: usual}
tenants:
  acme: {weight: 3, limits: {tokens: 100k/min, kv_bytes: 512MiB}}
  spent: {limits: {requests: {rate: 1/h, burst: 1}}}
"""
READS = [
    "state",
    "overview",
    "tenants",
    "tenants/acme",
    "requests",
    "queue",
    "kv",
    "policy",
    "policy/text",
    "policy/source?tenant=acme",
    "keys",
    "refusals",
    "request-log",
    "audit",
]
WRITES = [
    "requests/req_1/cancel",
    "policy/reload",
    "policy/check",
    "policy/what-if",
    "policy/source",
    "policy/undo",
    "drain",
    "keys",
    "keys/demo/rotate",
    "keys/demo/revoke",
]


class Site(TenantSite):
    def complete(self, tenant: str, **body: Any) -> httpx.Response:
        return self.server.post("/v1/completions", key=self.keys[tenant], **completion(**body))

    @contextmanager
    def busy(self, tenant: str, count: int) -> Iterator[list[RawClient]]:
        """With long streams of a tenant, which are dropped at the end."""
        body = completion(max_tokens=1900, ignore_eos=True, stream=True)
        raw = request(self.server, body, "/v1/completions", **self.authorization(tenant))
        try:
            with ExitStack() as held:
                clients = [held.enter_context(connected(self.server)) for _ in range(count)]
                for client in clients:
                    client.send(raw)
                yield clients
        finally:
            eventually(lambda: not self.server.admin("requests")["live"])

    def live(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.server.admin("requests")["live"]
        return rows


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with tenant_site(Site, tmp_path_factory.mktemp("admin"), POLICY, "--max-num-seqs", "2") as site:
        yield site


def test_the_announcement_says_where_it_is_and_where_its_key_is(site: Site) -> None:
    assert f"admin     {site.server.admin_url}, its key in" in site.server.announcement
    assert site.server.admin_key.startswith("sluice-admin-")
    assert site.server.admin_key not in site.server.announcement


@pytest.mark.parametrize("path", [*(f"/admin/v1/{path}" for path in READS), "/metrics", "/admin/", "/admin/v2/x"])
@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Basic x", "Bearer " + "x" * 4000, "TENANT"])
def test_without_the_admin_key_nothing_is_told(site: Site, path: str, authorization: str) -> None:
    if authorization == "TENANT":
        authorization = f"Bearer {site.keys['acme']}"
    reply = httpx.get(f"{site.server.admin_url}{path}", headers={"authorization": authorization})
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("path", WRITES)
def test_without_the_admin_key_nothing_is_changed(site: Site, path: str) -> None:
    before = site.server.admin("audit")
    assert httpx.post(f"{site.server.admin_url}/admin/v1/{path}").status_code == 401
    assert site.server.admin("audit") == before
    assert site.server.answers()


def test_the_admin_key_opens_nothing_on_the_tenants_port(site: Site) -> None:
    reply = httpx.get(f"{site.server.url}/v1/models", headers=site.server.admin_headers)
    assert reply.status_code == 401
    assert httpx.get(f"{site.server.url}/admin/v1/overview", headers=site.server.admin_headers).status_code == 404


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/health", "/ping"])
def test_probes_need_no_key(site: Site, path: str) -> None:
    reply = httpx.get(f"{site.server.admin_url}{path}")
    assert (reply.status_code, reply.json()["status"]) == (200, "ok")


def test_everything_answers_and_says_so_to_browsers_that_are_not_the_page(site: Site) -> None:
    for path in READS:
        reply = site.server.ask_admin(path)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "application/json"
        assert_hardened(reply)


def test_a_live_request_is_seen_with_its_state_and_what_waits_with_its_reason(site: Site) -> None:
    with site.busy("acme", 4):
        eventually(lambda: [row["state"] for row in site.live()].count("decoding") == 2 and len(site.live()) == 4)
        decoding = next(row for row in site.live() if row["state"] == "decoding")
        assert (decoding["tenant"], decoding["class"], decoding["max_tokens"]) == ("acme", "usual", 1900)
        assert decoding["kv_blocks"] > 0 and decoding["reason"] is None
        waiting = site.server.admin("queue")["waiting"]
        assert len(waiting) == 2
        assert "max_num_seqs sequences were running" in waiting[0]["reason"]
        engine = site.server.admin("overview")["engine"]
        assert (engine["running"], engine["waiting"], engine["max_num_seqs"]) == (2, 2, 2)
        acme = site.server.admin("tenants/acme")
        assert (acme["running"], acme["waiting"], acme["weight"], acme["class"]) == (2, 2, 3, "usual")
        limits = {limit["name"]: limit for limit in acme["limits"]}
        assert 0 < limits["kv_bytes"]["left"] < limits["kv_bytes"]["amount"] == 512 * 2**20
        assert limits["tokens/min"]["left"] < 100_000
        kv = site.server.admin("kv")
        holders = {kv["owners"][owner] for owner, _, use in kv["runs"] if owner >= 0 and use != Use.CACHED}
        assert holders == {"acme"}, "what others have left is idle"
        assert sum(blocks for _, blocks, _ in kv["runs"]) == kv["num_blocks"]


def test_a_request_that_ended_keeps_its_timeline(site: Site) -> None:
    reply = site.complete("acme", max_tokens=5, ignore_eos=True)
    shown = site.server.admin(f"requests/{reply.headers['x-request-id']}")
    assert (shown["outcome"], shown["output_tokens"], shown["response_id"]) == ("completed", 5, reply.json()["id"])
    phases = ("auth", "body", "reserve", "queue", "prefill", "first token", "decode", "settle", "end")
    assert tuple(span["what"] for span in shown["timeline"]) == phases
    assert shown["timeline"][-1]["at"] == pytest.approx(shown["duration"])


def test_ended_requests_are_searched_by_what_their_client_said_of_them(site: Site) -> None:
    body = completion(max_tokens=3, ignore_eos=True)
    for session in ("one", "two"):
        headers = {"x-sluice-session": session, **site.authorization("acme")}
        reply = httpx.post(f"{site.server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    (found,) = site.server.admin("request-log?session=two&since=1h")["requests"]
    assert (found["response_id"], found["tenant"], found["output_tokens"]) == (reply.json()["id"], "acme", 3)
    refused = site.server.ask_admin("request-log?status=42")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "status")


def test_the_series_counts_what_was_served(site: Site) -> None:
    site.complete("acme", max_tokens=50, ignore_eos=True)

    def counted() -> bool:
        points = site.server.admin("overview")["series"]["points"]
        return bool(sum(filter(None, points["output_tokens"])) >= 50 and any(points["requests"]))

    eventually(counted)
    points = site.server.admin("overview")["series"]["points"]
    assert {len(values) for name, values in points.items() if name != "waiting"} == {300}
    assert set(points["waiting"]) == {"fast", "usual"}
    assert any(points["gap_p99"]) and any(points["ttft_p50"])


def test_a_refusal_is_listed_with_its_limit(site: Site) -> None:
    while site.complete("spent", max_tokens=1).status_code == 200:
        pass
    newest = site.server.admin("refusals")["refusals"][0]
    assert (newest["tenant"], newest["status"], newest["reason"]) == ("spent", 429, "rate")
    assert "limit requests/h is 1" in newest["message"]
    assert site.server.admin("tenants/spent")["refused"] >= 1


def test_names_from_a_hostile_client_are_only_data(site: Site) -> None:
    name = "<script>alert(1)</script>" + "x" * 100_000
    assert site.complete("acme", model=name).status_code == 404
    reply = site.server.ask_admin("refusals")
    assert_hardened(reply)
    newest = reply.json()["refusals"][0]
    assert "<script>" in newest["message"] and len(reply.content) < 100_000
    assert max(len(row["model"]) for row in site.server.admin("requests")["recent"]) <= 200


def test_tenants_come_from_the_policy_and_from_keys(site: Site) -> None:
    assert {"acme", "spent", "demo"} <= {row["name"] for row in site.server.admin("tenants")["tenants"]}
    reply = site.server.ask_admin("tenants/nobody")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "tenant_not_found")


def test_the_gateway_diagnoses_itself_from_what_it_shows(site: Site) -> None:
    for finding in site.server.admin("diagnosis")["findings"]:
        assert finding.keys() == {"name", "trouble", "evidence", "remedy", "severity"}


def test_no_secret_is_in_anything_that_is_read(site: Site) -> None:
    site.complete("acme", prompt="a-planted-secret", max_tokens=1)
    hashes = [record.digest.hex() for record in site.store.records()]
    for path in READS:
        text = json.dumps(site.server.admin(path))
        for secret in ("a-planted-secret", *site.keys.values(), site.server.admin_key, *hashes):
            assert secret not in text


def test_a_cancelled_stream_ends_with_an_error_event(site: Site) -> None:
    with site.busy("acme", 1) as (client,):
        eventually(lambda: any(row["state"] == "decoding" for row in site.live()))
        (row,) = site.live()
        assert site.server.admin(f"requests/{row['response_id']}/cancel", "POST") == {"cancelled": True}
        heard = b""
        while data := client.receive():
            heard += data
            if b'"code":"cancelled"' in heard:
                break
        assert b"cancelled by an administrator" in heard and b"[DONE]" not in heard
    ended = site.server.admin(f"requests/{row['id']}")
    assert (ended["outcome"], ended["code"]) == ("failed", "cancelled")
    eventually(lambda: site.server.admin("overview")["engine"]["kv_blocks_used"] == 0)
    newest = site.server.admin("audit")["entries"][0]
    told = (newest["action"], newest["target"], newest["result"])
    assert told == ("request.cancel", f"{row['id']} of acme", "cancelled")
    assert newest["actor"].startswith("key ") and "127.0.0.1" in newest["actor"]


def test_a_cancelled_request_that_waits_is_answered_503_and_not_retried(site: Site) -> None:
    answers: list[httpx.Response] = []
    with site.busy("acme", 2):
        eventually(lambda: [row["state"] for row in site.live()] == ["decoding"] * 2)  # neither waits for a lease
        with in_threads(lambda: answers.append(site.complete("acme", max_tokens=1500))):
            waiting: list[dict[str, Any]] = []  # as seen once: it may leave the queue before one looks again
            eventually(lambda: waiting.extend(site.server.admin("queue")["waiting"]) or bool(waiting))
            site.server.admin(f"requests/{waiting[0]['id']}/cancel", "POST")
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "cancelled")
    assert answers[0].headers["x-should-retry"] == "false"


def test_a_request_that_is_over_cannot_be_cancelled(site: Site) -> None:
    name = site.complete("acme", max_tokens=1).headers["x-request-id"]
    reply = site.server.ask_admin(f"requests/{name}/cancel", "POST")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize(
    ("role", "allowed"), [("viewer", set()), ("operator", {"reload"}), ("admin", {"reload", "keys"})]
)
def test_an_admin_does_what_its_role_allows_and_is_named_in_the_audit_log(
    site: Site, role: Role, allowed: set[str]
) -> None:
    key = AdminStore(site.store).create(f"ada-{role}", role)
    ask = partial(httpx.request, headers=bearer(key), timeout=PATIENCE)
    at = f"{site.server.admin_url}/admin/v1"
    assert ask("GET", f"{at}/me").json() == {"name": f"ada-{role}", "role": role}
    for name, path, body in (("reload", "policy/reload", None), ("keys", "keys", {"tenant": "acme"})):
        reply = ask("POST", f"{at}/{path}", json=body)
        if name in allowed:
            assert reply.status_code == 200, reply.text
        else:
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "role_not_allowed")
    mine = [one["action"] for one in site.server.admin("audit")["entries"] if f"ada-{role} from" in one["actor"]]
    assert mine == [
        action for name, action in (("keys", "keys.create"), ("reload", "policy.reload")) if name in allowed
    ]


def test_an_edit_of_the_policy_is_in_its_history_and_in_the_audit_log(site: Site) -> None:
    before = site.server.admin("policy")["version"]
    site.policy.write_text(POLICY.replace("weight: 3", "weight: 5"))
    answer = site.server.admin("policy/reload", "POST")
    shown = site.server.admin("policy")
    assert shown["version"] == answer["version"] != before
    assert shown["effective"]["tenants"]["acme"]["weight"] == 5
    assert shown["history"][0]["changes"] == ["tenant acme", "  weight: 3 -> 5"]
    assert [edition["version"] for edition in shown["history"]][:2] == [answer["version"], before]
    actions = [entry["action"] for entry in site.server.admin("audit")["entries"]]
    assert {"policy.reload", "policy.change"} <= set(actions)
    site.policy.write_text(POLICY)
    eventually(lambda: site.server.admin("policy")["version"] == before)


def test_a_key_that_is_revoked_is_in_the_audit_log(site: Site) -> None:
    store = site.store
    _, record = new_key("acme", store.pepper())

    def on_record(change: str) -> bool:
        return any(entry["target"] == f"{change} {record.id}" for entry in site.server.admin("audit")["entries"])

    store.add(record)
    eventually(lambda: on_record("added"))
    assert record.id in [key["id"] for key in site.server.admin("tenants/acme")["keys"]]
    store.remove(record.id)
    eventually(lambda: on_record("removed"))


@pytest.mark.parametrize(
    "path", ["/../key.py", "/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd", "/page/../app.py", "/app.py", "/%00"]
)
def test_no_path_leads_out_of_the_page(site: Site, path: str) -> None:
    heard = b""
    with connected(site.server, port=site.server.admin_port) as client:
        client.send(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        while data := client.receive():
            heard += data
    assert heard.startswith(b"HTTP/1.1 404 ") and b'"code":"unknown_url"' in heard


def test_the_page_is_served_to_anyone_and_hardened(site: Site) -> None:
    reply = httpx.get(site.server.admin_url)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert_hardened(reply)
    assert site.server.admin_key not in reply.text


@pytest.mark.parametrize(("method", "path"), [("DELETE", "kv"), ("GET", "drain"), ("POST", "overview"), ("PUT", "x")])
def test_other_methods_and_paths_are_typed_errors(site: Site, method: str, path: str) -> None:
    reply = site.server.ask_admin(path, method)
    assert reply.status_code == (404 if path == "x" else 405)
    assert {"message", "type", "param", "code"} <= reply.json()["error"].keys()
    assert_hardened(reply)


@pytest.mark.parametrize("name", ["nobody", "%00", "a%0ab", "x" * 3000, "%f0%28%8c%28", "..%2f..%2fetc"])
def test_names_that_nothing_has_are_404(site: Site, name: str) -> None:
    for path in (f"requests/{name}", f"tenants/{name}"):
        assert site.server.ask_admin(path).status_code == 404


def test_a_client_with_all_connections_of_the_admin_port_makes_room_for_others(site: Site) -> None:
    with ExitStack() as held:
        made = (connected(site.server, port=site.server.admin_port) for _ in range(ADMIN_CONNECTIONS + 1))
        clients = [held.enter_context(client) for client in made]
        assert clients[0].is_closed()
        assert httpx.get(f"{site.server.admin_url}/livez").status_code == 200
        assert site.server.admin("overview")
        assert site.complete("acme", max_tokens=1).status_code == 200


def assert_hardened(reply: httpx.Response) -> None:
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';") and "frame-ancestors 'none'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cache-control"] == "no-store"


def test_a_drain_lets_answers_end_and_the_admin_watch_it(tmp_path: Path) -> None:
    with running_server(tmp_path, "--threads", "1") as server, connected(server) as client:
        client.send(request(server, completion(max_tokens=1500, ignore_eos=True, stream=True), "/v1/completions"))
        heard = client.receive()
        assert server.admin("drain", "POST") == {"draining": True}
        assert server.admin("overview")["draining"] is True
        assert httpx.get(f"{server.admin_url}/readyz").status_code == 503
        assert httpx.get(f"{server.admin_url}/livez").status_code == 200
        while data := client.receive():
            heard += data
        assert b"data: [DONE]" in heard
        assert server.process.wait(PATIENCE) == 0
    found, drained = map(json.loads, (tmp_path / "state" / "audit.log").read_text().splitlines())
    assert (found["action"], found["result"], drained["action"]) == ("gateway.start", "in force; keys: 1", "drain")


def test_no_admin_port_where_none_is_wanted(tmp_path: Path) -> None:
    with running_server(tmp_path, "--threads", "1", "--admin-port", "off") as server:
        assert server.admin_port == 0 and "admin" not in server.announcement
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat(), headers=server.headers).status_code == 200
    assert not (tmp_path / "state" / "admin-key").exists()

"""Limits as a tenant meets them, and what one who would get around them meets."""

import base64
import hmac
import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from threading import Thread
from typing import Any

import httpx
import openai
import pytest

from admission.outcome import Outcome
from gateway.errors import InvalidApiKey
from gateway.tenants.auth import KeyRing, new_key
from tests.gateway.raw_client import connected
from tests.gateway.server_process import BODY, PATIENCE, assert_unharmed, bearer, eventually, in_threads
from tests.gateway.tenant_site import TenantSite, error_of, site_fixture

LONG = "Tell me a long story about a fox and a lighthouse."

POLICY = """
classes:
  fast: {service_tiers: [priority], time_per_output_token: 50ms}
  usual: {aging: 2s}
defaults: {default_class: usual}
tenants:
  mallory: {limits: {requests: {rate: 3/h, burst: 3}, tokens: 100k/h}}
  victim: {limits: {requests: 1k/h, tokens: 100k/h}}
  hurried: {limits: {requests: {rate: 2/h, burst: 2}}}
  spent: {limits: {tokens: 60/day}}
  small: {limits: {tokens: 300/h}}
  metered: {limits: {tokens: 200/day}}
  paying: {price: {input: 2/1M, cached_input: 0.5/1M, output: 10/1M, currency: EUR}, limits: {cost: 0.002/day}}
  single: {limits: {concurrent_requests: 1}}
  chatty: {limits: {tokens: {rate: 600k/min, burst: 500}}}
  packed: {limits: {kv_bytes: 800KiB}}
  tiny: {limits: {kv_bytes: 300KiB}}
  lowered: {limits: {kv_bytes: 16MiB}}
  queued: {limits: {queued_requests: 2}}
  picky: {models: [another]}
  narrow: {}
  edited: {limits: {requests: 100/min}}
  euro: {team: research, limits: {tokens: 10k/day}, price: {input: 2/1M, output: 10/1M, currency: EUR}}
  watched: {}
  agent: {limits: {tokens: 150/session, requests: 1k/day}}
  cheap: {team: research, price: {input: 1/1M, output: 5/1M, currency: EUR}}
teams:
  research: {time_zone: Europe/Berlin, week_starts: sunday, currency: EUR, limits: {cost: 0.002/week, requests: 1k/h}}
"""


class Site(TenantSite):
    def left(self, tenant: str) -> dict[str, int]:
        return {resource: entry["remaining"] for resource, entry in self.limits(tenant).items()}

    def ended(self, outcome: Outcome) -> float:
        return self.server.metric("sluice_requests_total", f'outcome="{outcome}"')


site = site_fixture(Site, POLICY, "--refused-per-second", "10000")


SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
FORGED = [
    {"x-sluice-tenant": "victim"},
    {"x-tenant": "victim", "x-tenant-id": "victim", "x-user": "victim"},
    {"openai-organization": "victim", "openai-project": "victim"},
    {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1", "x-real-ip": "127.0.0.1"},
    {"x-sluice-priority": "0", "x-priority": "-1", "x-sluice-class": "interactive"},
    {"date": "Thu, 01 Jan 2099 00:00:00 GMT", "x-sluice-now": "4102444800"},
]


def test_a_tenants_claims_charge_no_other_tenant(site: Site) -> None:
    before = site.left("victim")
    for headers in FORGED[:3]:
        assert site.post("mallory", headers, **SHORT, user="victim").status_code == 200
    for headers in FORGED:
        assert site.post("mallory", headers, **SHORT, user="victim").status_code == 429
    assert site.left("victim") == before


def test_a_tenant_sees_nothing_of_another(site: Site) -> None:
    own = site.get("mallory", "/v1/limits?tenant=victim", **FORGED[0])
    assert own.json()["tenant"] == "mallory" and "victim" not in own.text
    for path in ("/v1/limits/victim", "/v1/tenants", "/v1/usage", "/admin", "/v1/keys"):
        assert site.get("mallory", path).status_code == 404


def test_a_key_with_the_id_of_another_opens_nothing(site: Site) -> None:
    prefix, _, _ = site.keys["victim"].rpartition("-")
    _, _, own_secret = site.keys["mallory"].rpartition("-")
    guesses = [f"{prefix}-{own_secret}", f"{prefix}-{secrets.token_hex(20)}", prefix, f"{prefix}-", f"{prefix}-%00"]
    for guess in guesses:
        site.keys["guess"] = guess
        assert site.post("guess", **SHORT).status_code == 401
    assert site.post("victim", **SHORT).status_code == 200


def test_a_hundred_thousand_guessed_keys_leave_nothing_in_memory() -> None:
    key, record = new_key("acme", b"p" * 32)
    ring = KeyRing(b"p" * 32, [record])
    for number in range(100_000):
        with pytest.raises(InvalidApiKey):
            ring.authenticate(b"Bearer sk-sluice-%08x-%040x" % (number, number))
    assert len(ring) == 1
    assert ring.authenticate(f"Bearer {key}".encode()).tenant == "acme"


def test_a_server_that_was_guessed_at_is_unharmed(site: Site) -> None:
    with httpx.Client(timeout=PATIENCE) as client:
        for number in range(300):
            guess = bearer(f"sk-sluice-{number:08x}-{secrets.token_hex(20)}")
            assert client.get(f"{site.server.url}/v1/limits", headers=guess).status_code == 401
    assert set(site.left("victim")) == {"requests", "tokens"}
    assert_unharmed(site.server)


def test_a_rate_lets_its_burst_pass_and_then_says_when(site: Site) -> None:
    assert [site.post("hurried").status_code for _ in range(2)] == [200, 200]
    refused = site.post("hurried")
    error = error_of(refused)
    assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert (error["limit"], error["asked"], error["left"]) == ("requests/h", 1, 0)
    assert refused.headers["retry-after"] == "60", "a longer wait would not be honoured"
    assert refused.headers["x-sluice-dropped-reason"] == "rate"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    assert refused.headers["ratelimit"].startswith('"requests/h";r=0;t=')
    with pytest.raises(openai.RateLimitError):
        site.client("hurried").models.list() and site.client("hurried").chat.completions.create(
            model="embedded", messages=[{"role": "user", "content": "Hi."}]
        )


def test_a_spent_budget_is_not_retried(site: Site) -> None:
    assert site.post("spent", max_tokens=10).status_code == 200
    refused = site.post("spent", max_tokens=40)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(error_of(refused)["left"])


def test_a_budget_in_money_is_settled_exactly_and_then_spent(site: Site) -> None:
    left = 2_000_000  # billionths
    prompt = [{"role": "user", "content": "Tell me a story about a lighthouse and its keeper, who counts the ships."}]
    while True:
        reply = site.post("paying", messages=prompt, max_tokens=40, ignore_eos=True)
        if reply.status_code != 200:
            break
        usage = reply.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        left -= 2000 * (usage["prompt_tokens"] - cached) + 500 * cached + 10_000 * usage["completion_tokens"]
        entry = site.limits("paying")["cost"]
        assert (entry["remaining"], entry["currency"], entry["per"]) == (left / 1e9, "EUR", "day")
    assert error_of(reply)["code"] == "insufficient_quota"
    assert "limit cost/day is 0.002 EUR: this request asks for" in error_of(reply)["message"]
    never = site.post("paying", messages=prompt, max_tokens=400)
    assert (never.status_code, error_of(never)["type"]) == (400, "invalid_request_error")


def test_a_team_spends_one_budget_at_the_prices_of_its_tenants(site: Site) -> None:
    left = 2_000_000  # billionths
    for tenant, price in (("euro", 2), ("cheap", 1)):
        usage = site.post(tenant, max_tokens=20, ignore_eos=True).json()["usage"]
        left -= 1000 * price * (usage["prompt_tokens"] + 5 * usage["completion_tokens"])
        cost = site.limits(tenant)["cost"]
        assert (cost["applies_to"], cost["per"]) == ("team", "week")
        assert (cost["remaining"], cost["currency"]) == (left / 1e9, "EUR")
    assert site.get("cheap").json()["team"] == "research"
    while (refused := site.post("euro", max_tokens=150)).status_code == 200:
        pass
    error = error_of(refused)
    assert (refused.status_code, error["code"]) == (429, "insufficient_quota")
    assert (error["limit"], error["applies_to"]) == ("cost/week", "team")
    assert "Your team's limit cost/week is 0.002 EUR" in error["message"]
    assert site.limits("cheap")["cost"]["remaining"] == site.limits("euro")["cost"]["remaining"]


def test_a_session_spends_its_limit_and_another_begins_with_all_of_it(site: Site) -> None:
    def session(name: str) -> dict[str, str]:
        return {"x-sluice-session": name}

    used = 0
    while (reply := site.post("agent", session("a"), max_tokens=20, ignore_eos=True)).status_code == 200:
        used += reply.json()["usage"]["total_tokens"]
    error = error_of(reply)
    assert (reply.status_code, error["code"], reply.headers["x-should-retry"]) == (429, "insufficient_quota", "false")
    assert (error["limit"], error["applies_to"], error["left"]) == ("tokens/session", "session", 150 - used)
    assert "Begin another session" in error["message"]
    entries = site.get("agent", **session("a")).json()["data"]
    (entry,) = [entry for entry in entries if entry["applies_to"] == "session"]
    assert (entry["per"], entry["amount"], entry["remaining"]) == ("session", 150, 150 - used)
    assert "remaining" not in site.limits("agent")["tokens"], "without a session there is no rest of it"
    for headers in (session("b"), {"x-claude-code-session-id": "c"}, {}):
        assert site.post("agent", headers, max_tokens=20).status_code == 200


def test_an_alert_of_a_budget_is_sent_once_and_signed(site: Site) -> None:
    got: Queue[tuple[dict[str, str], bytes]] = Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put((dict(self.headers), self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        Thread(target=receiver.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{receiver.server_port}/alerts"
        budget = f"{{budget: 500/day, soft: true, alerts: [{{at: 10%, url: '{url}'}}, {{at: 900%, url: '{url}'}}]}}"
        site.edit(POLICY.replace("watched: {}", f"watched: {{limits: {{tokens: {budget}}}}}"))
        assert all(site.post("watched", max_tokens=60, ignore_eos=True).status_code == 200 for _ in range(12))
        headers, body = got.get(timeout=PATIENCE)
        eventually(lambda: site.server.metric("sluice_budget_alerts_sent_total") == 1)
        receiver.shutdown()
    assert got.empty()
    headers = {name.lower(): value for name, value in headers.items()}
    secret = base64.b64decode((site.policy.parent / "state" / "webhook-secret").read_text().removeprefix("whsec_"))
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signature = base64.b64encode(hmac.digest(secret, content, "sha256")).decode()
    assert headers["webhook-signature"] == f"v1,{signature}"
    told = json.loads(body)
    data = told["data"]
    assert (told["type"], data["tenant"], data["at_percent"]) == ("budget.reached", "watched", 10)
    assert (data["resource"], data["per"], data["amount"], data["soft"]) == ("tokens", "day", 500, True)
    assert data["used"] >= 50
    assert site.limits("watched")["tokens"]["remaining"] == 0, "a soft budget refused nothing"


def test_a_request_that_never_fits_is_a_bad_request_and_costs_nothing(site: Site) -> None:
    before = site.left("small")["tokens"]
    refused = site.post("small", max_tokens=400)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "quota_unsatisfiable")
    assert site.left("small")["tokens"] == before


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_settled_exactly_and_told_in_the_headers(site: Site, stream: bool) -> None:
    before = site.left("small")["tokens"]
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = site.post("small", max_tokens=100, stream=stream, **options)
    assert reply.status_code == 200
    assert reply.headers["x-ratelimit-limit-tokens"] == "300"
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) <= before - 100
    assert reply.headers["ratelimit-policy"] == '"tokens/h";q=300;w=3600'
    usage = json.loads(reply.text.split("data: ")[-2] if stream else reply.text)["usage"]
    assert site.left("small")["tokens"] - (before - usage["total_tokens"]) in (0, 1), "a token may have refilled"


def test_a_slot_is_free_again_when_its_answer_is_there_or_its_client_is_not(site: Site) -> None:
    for _ in range(5):
        assert site.post("single").status_code == 200
    with site.client("single") as client:
        with client.chat.completions.create(
            model="embedded",
            messages=[{"role": "user", "content": LONG}],
            stream=True,
            max_tokens=1500,
            extra_body={"ignore_eos": True},
        ) as stream:
            next(iter(stream))
            refused = site.post("single")
            assert (refused.status_code, error_of(refused)["code"]) == (429, "concurrency_exceeded")
            assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000
        eventually(lambda: site.post("single").status_code == 200)


def test_an_answer_of_undeclared_length_reserves_more_as_it_goes(site: Site) -> None:
    """It is read until it is longer than the burst holds at once."""
    left_before = site.ended(Outcome.DISCONNECTED)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = BODY | {"messages": [{"role": "user", "content": LONG}], "ignore_eos": True, "seed": 1, "stream": True}
    with httpx.stream(
        "POST",
        f"{site.server.url}/v1/chat/completions",
        json=body | {"stream_options": options},
        headers=site.authorization("chatty"),
        timeout=PATIENCE,
    ) as reply:
        usages = (json.loads(line[6:])["usage"] for line in reply.iter_lines() if line.startswith("data: {"))
        assert any(usage["completion_tokens"] > 700 for usage in usages)
    eventually(lambda: site.ended(Outcome.DISCONNECTED) == left_before + 1)


def test_an_answer_that_outlasts_the_budget_ends_as_refused(site: Site) -> None:
    before = {outcome: site.ended(outcome) for outcome in Outcome}
    refused = site.post("metered", messages=[{"role": "user", "content": LONG}], ignore_eos=True)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "insufficient_quota")
    after = {outcome: site.ended(outcome) for outcome in Outcome}
    assert after == before | {Outcome.REFUSED: before[Outcome.REFUSED] + 1}


def test_a_tenant_at_its_kv_limit_waits_and_is_answered(site: Site) -> None:
    alone = site.post("packed", max_tokens=60, ignore_eos=True, temperature=0).json()["choices"]
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(site.post("packed", max_tokens=60, ignore_eos=True, temperature=0))

    with in_threads(*[ask] * 8):
        pass
    assert [reply.status_code for reply in replies] == [200] * 8
    assert all(reply.json()["choices"] == alone for reply in replies)


def test_a_sequence_that_the_kv_limit_cannot_hold_is_refused(site: Site) -> None:
    refused = site.post("tiny", max_tokens=1000)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "quota_unsatisfiable")
    assert "kv_bytes" in error_of(refused)["message"]
    undeclared = site.post("tiny", ignore_eos=True)
    assert undeclared.status_code == 200 and undeclared.json()["choices"][0]["finish_reason"] == "length"


def test_more_prompts_than_may_wait_are_no_matter_of_time(site: Site) -> None:
    with site.client("queued") as client:
        assert len(client.completions.create(model="embedded", prompt=["1, 2,"] * 2, max_tokens=1).choices) == 2
        with pytest.raises(openai.BadRequestError, match="queued_requests is 2") as refused:
            client.completions.create(model="embedded", prompt=["1, 2,"] * 3, max_tokens=1)
    assert (refused.value.code, refused.value.param) == ("quota_unsatisfiable", "prompt")


def test_a_running_request_ends_normally_when_the_kv_limit_is_lowered(site: Site) -> None:
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(site.post("lowered", max_tokens=600, ignore_eos=True))

    with in_threads(*[ask] * 3):
        eventually(lambda: site.server.metric("sluice_kv_blocks_used") > 10)
        site.policy.write_text(POLICY.replace("kv_bytes: 16MiB", "kv_bytes: 300KiB"))
        eventually(lambda: site.post("lowered", max_tokens=100).status_code == 400)
        assert site.post("lowered", max_tokens=1).status_code == 200
    assert [reply.status_code for reply in replies] == [200] * 3
    site.policy.write_text(POLICY)


def test_a_model_that_a_tenant_may_not_use_does_not_exist_for_it(site: Site) -> None:
    refused = site.post("picky")
    assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")
    assert site.client("picky").models.list().data == []
    headers = site.authorization("picky")
    for path, body in (("tokenize", {"prompt": "Hi"}), ("detokenize", {"tokens": [5], "model": "embedded"})):
        assert httpx.post(f"{site.server.url}/{path}", json=body, headers=headers).status_code == 404


def test_headers_that_claim_another_tenant_or_class_change_nothing(site: Site) -> None:
    forged = dict.fromkeys(("x-sluice-tenant", "x-tenant-id", "x-forwarded-user"), "narrow") | {
        "x-sluice-priority": "0"
    }
    assert site.post("hurried", headers=forged).status_code == 429


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority"])
def test_every_tier_is_served(site: Site, tier: str) -> None:
    assert site.post("narrow", service_tier=tier).status_code == 200


def test_an_edited_policy_takes_effect_and_a_bad_edit_does_not(site: Site) -> None:
    limit = '"requests/min";q={};w=60'
    assert site.post("edited", max_tokens=1).headers["ratelimit-policy"] == limit.format(100)
    site.policy.write_text(POLICY.replace("requests: 100/min", "requests: 200/min"))
    eventually(lambda: site.post("edited", max_tokens=1).headers["ratelimit-policy"] == limit.format(200))
    site.policy.write_text(POLICY.replace("requests: 100/min", "reqests: 300/min"))
    eventually(lambda: "reqests" in site.server.log.read_text())
    assert site.post("edited", max_tokens=1).headers["ratelimit-policy"] == limit.format(200)
    ready = httpx.get(f"{site.server.url}/readyz")
    assert ready.status_code == 200 and "reqests" not in ready.text
    assert "not valid" in ready.json()["policy"]["problem"]
    assert site.server.metric("sluice_policy_reload_failures_total") == 1
    assert site.server.metric("sluice_policy_info", ready.json()["policy"]["version"]) == 1
    site.policy.write_text(POLICY.replace("narrow: {}", "narrow: {prefix_cache: {floor: 1TiB}}"))
    eventually(lambda: "tenants.narrow.prefix_cache.floor: floors keep" in site.server.log.read_text())
    assert httpx.get(f"{site.server.url}/readyz").json()["policy"] == ready.json()["policy"]
    site.policy.write_text(POLICY)
    eventually(lambda: httpx.get(f"{site.server.url}/readyz").json()["policy"]["problem"] is None)


def test_a_revoked_key_opens_nothing_and_a_new_one_does(site: Site) -> None:
    key, record = new_key("narrow", site.store.pepper())
    site.keys["late"] = key
    site.store.add(record)
    eventually(lambda: site.post("late", max_tokens=1).status_code == 200)
    body = json.dumps(BODY).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
    with connected(site.server) as slow:
        slow.send(head.encode(), body[:10])
        site.store.remove(record.id)
        eventually(lambda: site.post("late", max_tokens=1).status_code == 401)
        slow.send(body[10:])
        assert slow.reply().status == 401, "nor does it for who began to send before"


def test_a_tenant_sees_its_own_limits(site: Site) -> None:
    entry = site.limits("chatty")["tokens"]
    assert (entry["amount"], entry["per"], entry["burst"]) == (600_000, "min", 500)
    assert 0 <= entry["remaining"] <= 500

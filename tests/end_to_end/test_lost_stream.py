"""A stream whose replica is killed is charged once, by what its client was handed."""

import signal
from pathlib import Path

import httpx
import orjson

from tests.fleet.fleet_site import FleetSite, fleet_site
from tests.gateway.server_process import BODY, PATIENCE, ServerProcess, bearer, eventually

AMOUNT = 10**9
POLICY = f"""
tenants:
  acme:
    on_store_outage: closed
    limits:
      requests: {AMOUNT}/month
      input_tokens: {AMOUNT}/month
      output_tokens: {AMOUNT}/month
      concurrent_requests: 100
"""
LEASE = 3600  # seconds: what a dead replica held is not free by itself while the test runs
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "logit_bias": {"1": -100}}  # without what would be no text
BODY_OF_MANY = BODY | ENDLESS | {"n": 2, "stream": True, "return_token_ids": True}


def left(site: FleetSite) -> dict[str, int]:
    limits = httpx.get(f"{site.url}/v1/limits", headers=bearer(site.keys["acme"]), timeout=PATIENCE).json()["data"]
    return {limit["resource"]: int(limit["remaining"]) for limit in limits}


def killed_in_the_middle(site: FleetSite) -> tuple[ServerProcess, int, int]:
    """Kill the replica that streams; return it, and the tokens of the prompt and of the answer that a client had."""
    url, headers = f"{site.url}/v1/chat/completions", bearer(site.keys["acme"])
    stream = httpx.stream("POST", url, json=BODY_OF_MANY, headers=headers, timeout=PATIENCE)
    with stream as response:
        read, killed = b"", None
        for part in response.iter_raw():
            read += part
            if killed is None and read.count(b"data: ") > 60:
                report = site.report()
                (killed,) = [one for one in site.replicas if report[one.url[7:]]["open_requests"]]
                killed.process.send_signal(signal.SIGKILL)
    assert killed is not None
    assert b'"code":"replica_lost"' in read
    assert b"[DONE]" not in read
    events = [orjson.loads(line[6:]) for line in read.splitlines() if line.startswith(b"data: {")]
    prompts = {len(event["prompt_token_ids"]) for event in events if "prompt_token_ids" in event}
    choices = [choice for event in events for choice in event.get("choices", ())]
    return killed, prompts.pop(), sum(len(choice.get("token_ids") or ()) for choice in choices)


def test_a_stream_whose_replica_is_killed_is_charged_by_what_was_delivered(tmp_path: Path, redis_url: str) -> None:
    with fleet_site(tmp_path, POLICY, "--redis-url", redis_url, "--quota-lease", str(LEASE)) as site:
        before = left(site)
        _, prompt, delivered = killed_in_the_middle(site)
        assert delivered > 30
        eventually(lambda: left(site)["concurrent_requests"] == 100)
        taken = {resource: before[resource] - amount for resource, amount in left(site).items()}
        assert taken == {"requests": 1, "input_tokens": prompt, "output_tokens": delivered, "concurrent_requests": 0}
        assert site.metric("sluice_route_settlements_total") == 1
        survivor = next(one for one in site.replicas if one.process.poll() is None)
        eventually(lambda: survivor.admin("usage")["total"]["output_tokens"] == delivered)

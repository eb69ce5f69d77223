"""Streams of which a replica is killed are charged once, by what their clients were handed."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.fleet.fleet_site import FleetSite, fleet_site
from tests.gateway.server_process import BODY, PATIENCE, ServerProcess, bearer, eventually

AMOUNT = 10**9
LIMITED = f"""
tenants:
  acme:
    on_store_outage: closed
    limits:
      requests: {AMOUNT}/month
      input_tokens: {AMOUNT}/month
      output_tokens: {AMOUNT}/month
      concurrent_requests: 100
"""
UNLIMITED = "tenants: {acme: {}}"
LEASE = 3600  # seconds: what a dead replica held is not free by itself while the test runs
ENDLESS = {"ignore_eos": True, "logit_bias": {"1": -100}}  # without what would be no text
STREAMS = 6
EVENTS = 30  # of each stream, after which a replica is killed


class Stream:
    """One streamed answer, as its client reads it to its end."""

    def __init__(self, site: FleetSite, number: int) -> None:
        self._site = site
        self._body = BODY | ENDLESS | {"stream": True, "return_token_ids": True, "max_tokens": 500, "n": 1 + number % 2}
        self._read = b""

    def read(self, begun: Callable[[], object]) -> None:
        url, headers = f"{self._site.url}/v1/chat/completions", bearer(self._site.keys["acme"])
        with httpx.stream("POST", url, json=self._body, headers=headers, timeout=PATIENCE) as response:
            for part in response.iter_raw():
                before, self._read = self._read, self._read + part
                if before.count(b"data: ") <= EVENTS < self._read.count(b"data: "):
                    begun()

    @property
    def is_cut(self) -> bool:
        is_lost = b'"code":"replica_lost"' in self._read
        assert is_lost is not self._read.endswith(b"data: [DONE]\n\n")
        return is_lost

    @property
    def tokens(self) -> tuple[int, int]:
        """Those of the prompt and those of the answer that came, by their ids."""
        lines = [line[6:] for line in self._read.splitlines() if line.startswith(b"data: {")]
        events: list[dict[str, Any]] = [orjson.loads(line) for line in lines]
        (prompt,) = {len(event["prompt_token_ids"]) for event in events if "prompt_token_ids" in event}
        choices = [choice for event in events for choice in event.get("choices", ())]
        return prompt, sum(len(choice.get("token_ids") or ()) for choice in choices)


def booked(replica: ServerProcess) -> tuple[int, int, int]:
    total = replica.admin("usage")["total"]
    return total["requests"], total["input_tokens"], total["output_tokens"]


def left(site: FleetSite) -> dict[str, int]:
    limits = httpx.get(f"{site.url}/v1/limits", headers=bearer(site.keys["acme"]), timeout=PATIENCE).json()["data"]
    return {limit["resource"]: int(limit["remaining"]) for limit in limits}


@pytest.mark.parametrize(
    "policy", [pytest.param(LIMITED, id="limited"), pytest.param(UNLIMITED, id="unlimited", marks=pytest.mark.nightly)]
)
def test_streams_are_charged_by_what_was_delivered_whether_their_replica_is_killed_or_not(
    tmp_path: Path, redis_url: str, policy: str
) -> None:
    flowing: list[Stream] = []
    with (
        fleet_site(tmp_path, policy, "--redis-url", redis_url, "--quota-lease", str(LEASE)) as site,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        before, streams = left(site), [Stream(site, number) for number in range(STREAMS)]
        reading = [pool.submit(stream.read, lambda stream=stream: flowing.append(stream)) for stream in streams]
        eventually(lambda: len(flowing) == STREAMS)
        open_requests = [site.report()[one.url[7:]]["open_requests"] for one in site.replicas]
        killed, survivor = sorted(site.replicas, key=lambda one: -open_requests[site.replicas.index(one)])
        killed.process.send_signal(signal.SIGKILL)
        for done in reading:
            done.result()
        cut = [stream for stream in streams if stream.is_cut]
        assert cut
        eventually(lambda: site.metric("sluice_route_settlements_total") == len(cut))
        prompts, outputs = map(sum, zip(*(stream.tokens for stream in streams), strict=True))
        if policy is LIMITED:
            eventually(lambda: left(site)["concurrent_requests"] == 100)
            taken = {resource: before[resource] - amount for resource, amount in left(site).items()}
            assert taken["requests"] == STREAMS
            assert (taken["input_tokens"], taken["output_tokens"]) == (prompts, outputs)
        eventually(lambda: booked(survivor) == (STREAMS, prompts, outputs))

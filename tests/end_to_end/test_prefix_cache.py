"""What requests begin with is computed once for their tenant, and said to be: the official client at a live server."""

import csv
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.telemetry.event_log_file import read_event_log
from gateway.tenants.usage import EXACT
from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import eventually, sluice
from tests.gateway.tenant_site import TenantSite, tenant_site

MODEL = "embedded"
BLOCK = 16
LOG = "events"
POLICY = """
prefix_sharing: {family: [acme, acme-eu]}
tenants:
  acme: {}
  acme-eu: {}
  beta: {limits: {tokens: 1M/day}}
  gamma: {}
  billed:
    limits: {tokens: 100k/day, input_tokens: 100k/day}
    price: {input: 1/1M, cached_input: 0.1/1M, output: 2/1M, currency: EUR}
"""


class Site(TenantSite):
    log: Path

    def ask(self, tenant: str, prompt: list[Any], **fields: Any) -> Any:
        """Four tokens that continue a prompt, or each of several."""
        extra = {"ignore_eos": True} | fields.pop("extra_body", {})
        asked = {"model": MODEL, "max_tokens": 4, "temperature": 0} | fields
        with self.client(tenant) as client:
            reply = client.completions.create(prompt=prompt, extra_body=extra, **asked)
            return list(reply) if isinstance(reply, openai.Stream) else reply

    def cached(self, tenant: str, prompt: list[Any], **extra_body: Any) -> int:
        """The prompt tokens that were found, as a whole answer says."""
        found: int = self.ask(tenant, prompt, extra_body=extra_body).usage.prompt_tokens_details.cached_tokens
        return found


@pytest.fixture(scope="module", params=NUMBERS_OF_WORKERS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, flags = tmp_path_factory.mktemp("cache"), ("--http-workers", str(request.param))
    log = f"--event-log={folder / LOG}"
    with tenant_site(Site, folder, POLICY, *flags, "--refused-per-second", "10000", log) as site:
        site.log = folder / LOG
        yield site


def a_prompt(length: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [random.randrange(5, 500) for _ in range(length)]


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("tenant", ["gamma", "beta"])  # without limits, and with one
@pytest.mark.parametrize("length", [5, 16, 17, 100, 1500])
def test_the_second_time_a_prompt_is_found_up_to_its_last_token(site: Site, tenant: str, length: int) -> None:
    prompt = a_prompt(length)
    first, second = site.ask(tenant, prompt), site.ask(tenant, prompt)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == whole_blocks(length - 1)
    assert second.usage.prompt_tokens == length
    assert second.choices[0].text == first.choices[0].text


@pytest.mark.parametrize("tenant", ["gamma", "beta"])
def test_the_prompts_of_a_request_are_found_each_and_counted_together(site: Site, tenant: str) -> None:
    """They have more blocks than are named without a turn of the event loop."""
    prompts = [a_prompt(1200) for _ in range(4)]
    assert site.cached(tenant, prompts) == 0
    assert site.cached(tenant, [*prompts, prompts[0][:500]]) == 4 * whole_blocks(1199) + whole_blocks(499)


@pytest.mark.parametrize("stop", [[], ["nothing that is ever said"]])
def test_a_stream_says_what_was_found_in_its_usage(site: Site, stop: list[str]) -> None:
    prompt = a_prompt(70)
    site.ask("gamma", prompt)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = site.ask("gamma", prompt, stream=True, stream_options=options, stop=stop)
    assert last.usage.prompt_tokens_details.cached_tokens == whole_blocks(69)
    assert {chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks} == {whole_blocks(69)}


def test_the_next_turn_finds_the_answer_before_it(site: Site) -> None:
    said: list[Any] = [{"role": "user", "content": "Count from 3 to 30."}]
    with site.client("gamma") as client:
        first = client.chat.completions.create(model=MODEL, messages=said, temperature=0)
        answer = first.choices[0].message.content
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Count from 5 to 9."}]
        second = client.chat.completions.create(model=MODEL, messages=said, temperature=0)
        with_another_tenant = site.client("beta").chat.completions.create(model=MODEL, messages=said, temperature=0)
    assert first.usage and second.usage and second.usage.prompt_tokens_details and with_another_tenant.usage
    num_tokens = first.usage.total_tokens - 1  # its end token was never fed
    assert whole_blocks(num_tokens - 1) <= (second.usage.prompt_tokens_details.cached_tokens or 0) <= num_tokens
    assert second.choices[0].message.content == with_another_tenant.choices[0].message.content


def test_a_tenant_finds_nothing_of_another(site: Site) -> None:
    prompt = a_prompt(100)
    for tenant in ("beta", "gamma", "acme", "billed"):
        assert site.cached(tenant, prompt, user="beta") == 0
        assert site.cached(tenant, prompt) == whole_blocks(99)


def test_tenants_of_a_sharing_group_find_each_others(site: Site) -> None:
    prompt = a_prompt(100)
    assert site.cached("acme", prompt) == 0
    assert site.cached("acme-eu", prompt) == whole_blocks(99)


def test_a_salt_can_only_narrow(site: Site) -> None:
    prompt = a_prompt(50)
    assert [site.cached("beta", prompt) for _ in range(2)] == [0, 48]
    for salt in ("mine", "another", "gamma", "group:family"):
        assert [site.cached("beta", prompt, cache_salt=salt) for _ in range(2)] == [0, 48]
    assert site.cached("gamma", prompt, cache_salt="mine") == 0
    assert site.cached("acme", prompt, cache_salt="mine") == 0
    assert site.cached("acme-eu", prompt, cache_salt="mine") == 48


def test_limits_count_what_was_found_and_the_bill_prices_it(site: Site) -> None:
    before = {resource: entry["remaining"] for resource, entry in site.limits("billed").items()}
    bill = billed(site)
    prompt = a_prompt(193)  # all but one token of which is found
    for _ in range(3):
        site.ask("billed", prompt)
    after = {resource: entry["remaining"] for resource, entry in site.limits("billed").items()}
    assert before["input_tokens"] - after["input_tokens"] == 3 * 193
    assert before["tokens"] - after["tokens"] == 3 * 193 + 3 * 4
    eventually(lambda: billed(site)["requests"] == bill["requests"] + 3)
    used = {name: amount - bill[name] for name, amount in billed(site).items()}
    cached = 2 * 192
    assert (used["input_tokens"], used["cached_tokens"], used["output_tokens"]) == (3 * 193, cached, 12)
    assert used["cost"] == pytest.approx(((3 * 193 - cached) * 1 + cached * 0.1 + 12 * 2) / 1e6)


def billed(site: Site) -> dict[str, float]:
    """What `sluice usage` says of the tenant until now."""
    flags = ("--csv", "--tenant", "billed", "--policy", site.policy, "--state-dir", site.store.directory)
    done = sluice("usage", *flags)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    names = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost")
    return {name: sum(float(EXACT.create_decimal(row[name] or 0)) for row in rows) for name in names}


def test_metrics_and_the_log_say_what_was_found(site: Site) -> None:
    def used() -> tuple[float, ...]:
        labels = [f'tenant="gamma",kind="{kind}"' for kind in ("prompt", "cached")]
        shown = [site.server.metric(f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits")]
        return *(site.server.metric("sluice_tenant_tokens_total", label) for label in labels), *shown

    prompt = a_prompt(133)
    site.ask("gamma", prompt)
    eventually(site.server.is_idle)
    computed, cached, queries, hits = used()
    site.ask("gamma", prompt)
    eventually(lambda: used() == (computed + 5, cached + 128, queries + 133, hits + 128))
    eventually(
        lambda: re.search(r'"prompt_tokens": ?133, ?"cached_tokens": ?128\b', site.server.log.read_text()) is not None
    )


def test_a_server_may_do_without(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tenant_site(Site, tmp_path_factory.mktemp("off"), POLICY, "--prefix-cache", "off") as site:
        prompt = a_prompt(100)
        assert [site.cached("beta", prompt, cache_salt="x") for _ in range(2)] == [0, 0]
        assert site.server.metric("sluice_tenant_tokens_total", 'kind="cached"') == 0


@pytest.mark.parametrize("seconds", ["12.5", "3600", None])
def test_when_a_client_comes_again_is_told_to_the_core(site: Site, seconds: str | None) -> None:
    headers = {} if seconds is None else {"x-sluice-expect-followup": seconds}
    prompt = a_prompt(40)
    answer = site.ask("gamma", prompt, extra_headers=headers)
    found = site.ask("gamma", [*prompt, *a_prompt(4)])
    assert found.usage.prompt_tokens_details.cached_tokens == whole_blocks(40)

    def told() -> list[float | None]:
        entries = (json.loads(line) for line in read_event_log(site.log))
        return [entry[17] for entry in entries if entry[0] == "arrive" and entry[2].startswith(answer.id)]

    eventually(lambda: told() == [seconds and float(seconds)])


def test_a_mark_for_caches_is_told_to_the_core_and_creates_nothing_that_is_charged(site: Site) -> None:
    asked = {"model": "embedded", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    message = site.server.post(
        "/v1/messages", key=site.keys["gamma"], cache_control={"type": "ephemeral"}, **asked
    ).json()
    assert message["usage"]["cache_creation_input_tokens"] == 0

    def told() -> list[float | None]:
        entries = (json.loads(line) for line in read_event_log(site.log))
        return [entry[17] for entry in entries if entry[0] == "arrive" and entry[2].startswith(message["id"])]

    eventually(lambda: told() == [300.0])


@pytest.mark.parametrize("seconds", ["0", "3600.5", "soon", "-1", "1e2", ""])
def test_a_malformed_follow_up_time_is_refused_by_name(site: Site, seconds: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        site.ask("gamma", a_prompt(5), extra_headers={"x-sluice-expect-followup": seconds})
    assert refused.value.param == "x-sluice-expect-followup"
    assert "above 0 and at most 3600" in refused.value.message and "leave it out" in refused.value.message

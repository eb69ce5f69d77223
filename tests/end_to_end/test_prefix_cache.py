"""What requests begin with is computed once for their tenant, however many answers are asked for, and said to be; and a
tenant that tries to find what others have sent: the official client at a live server.
"""

import csv
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.telemetry.event_log_file import read_event_log
from gateway.tenants.auth import new_key
from gateway.tenants.usage import EXACT
from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import eventually, sluice
from tests.gateway.tenant_site import TenantSite, tenant_site

MODEL = "embedded"
BLOCK = 16
LOG = "events"
TENANTS = """
tenants:
  acme: {}
  acme-eu: {}
  beta: {limits: {tokens: 1M/day}}
  gamma: {}
  billed:
    limits: {tokens: 100k/day, input_tokens: 100k/day}
    price: {input: 1/1M, cached_input: 0.1/1M, output: 2/1M, currency: EUR}
  metered: {limits: {input_tokens: 100k/day, output_tokens: 100k/day}}
  queued: {limits: {queued_requests: 2}}
"""
GROUP = "prefix_sharing: {family: [acme, acme-eu]}"


class Site(TenantSite):
    log: Path

    def ask(self, tenant: str, prompt: list[Any], **fields: Any) -> Any:
        """Four tokens that continue a prompt, or each of several, or more answers to it."""
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
    with tenant_site(Site, folder, GROUP + TENANTS, *flags, "--refused-per-second", "10000", log) as site:
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


@pytest.mark.parametrize("salt", ["beta", "tenant:beta", "tenant:gamma", "gamma", "\0", "é" * 256, "\U0001f98a" * 256])
def test_no_salt_finds_what_another_tenant_cached_nor_what_was_cached_without_it(site: Site, salt: str) -> None:
    prompt = a_prompt(100)
    assert [site.cached("beta", prompt), site.cached("beta", prompt, cache_salt=salt)] == [0, 0]
    assert site.cached("gamma", prompt, cache_salt=salt) == 0
    assert [site.cached("gamma", prompt), site.cached("gamma", prompt)] == [0, 96]
    assert site.cached("gamma", prompt, cache_salt=salt) == 96


def test_salts_that_look_alike_are_two(site: Site) -> None:
    prompt = a_prompt(100)
    assert [site.cached("beta", prompt, cache_salt=salt) for salt in ("\u00e9", "e\u0301", "\u00c9")] == [0, 0, 0]
    assert site.cached("beta", prompt, cache_salt="\u00e9") == 96


def test_blocks_computed_by_a_member_that_leaves_its_group_are_not_hit_there(site: Site) -> None:
    """A request belongs to the group that it arrived in; a tenant alone finds a new one."""
    prompt = a_prompt(100)
    with site.client("acme-eu") as client:
        stream = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        assert isinstance(stream, openai.Stream)
        next(stream)
        site.edit("prefix_sharing: {family: [acme, gamma]}" + TENANTS)
        for tenant in ("acme", "acme-eu"):
            assert site.cached(tenant, prompt) == 0
        assert sum(1 for _ in stream) >= 1, "it is served to its end"
    assert site.cached("gamma", prompt) == 96, "what acme sent since"
    site.edit(GROUP + TENANTS)


def test_a_revoked_key_finds_nothing_any_more_and_another_of_its_tenant_does(site: Site) -> None:
    prompt = a_prompt(100)
    key, record = new_key("beta", site.store.pepper())
    site.store.add(record)
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    eventually(lambda: site.server.post("/v1/completions", key=key, **asked).status_code == 200)
    site.store.remove(record.id)
    eventually(lambda: site.server.post("/v1/completions", key=key, **asked).status_code == 401)
    assert "usage" not in site.server.post("/v1/completions", key=key, **asked).json()
    assert [site.cached("gamma", prompt), site.cached("beta", prompt)] == [0, 96]


def test_limits_count_what_was_found_and_the_bill_prices_it(site: Site) -> None:
    before = left(site, "billed")
    bill = billed(site)
    prompt = a_prompt(193)  # all but one token of which is found
    for _ in range(3):
        site.ask("billed", prompt)
    after = left(site, "billed")
    assert before["input_tokens"] - after["input_tokens"] == 3 * 193
    assert before["tokens"] - after["tokens"] == 3 * 193 + 3 * 4
    eventually(lambda: billed(site)["requests"] == bill["requests"] + 3)
    used = {name: amount - bill[name] for name, amount in billed(site).items()}
    cached = 2 * 192
    assert (used["input_tokens"], used["cached_tokens"], used["output_tokens"]) == (3 * 193, cached, 12)
    assert used["cost"] == pytest.approx(((3 * 193 - cached) * 1 + cached * 0.1 + 12 * 2) / 1e6)


def left(site: Site, tenant: str) -> dict[str, int]:
    return {resource: entry["remaining"] for resource, entry in site.limits(tenant).items()}


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


@pytest.mark.parametrize("length", [5, 96, 100, 1000])
def test_each_answer_is_that_of_its_seed_alone(site: Site, length: int) -> None:
    prompt = a_prompt(length)
    reply = site.ask("gamma", prompt, n=4, seed=11, max_tokens=16, temperature=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    alone = [site.ask("beta", prompt, seed=11 + n, max_tokens=16, temperature=2).choices[0].text for n in range(4)]
    assert [choice.text for choice in reply.choices] == alone and len(set(alone)) > 1
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (length, 64, 0)


def test_the_prompt_of_several_answers_is_computed_once_and_held_once(site: Site) -> None:
    """Its full blocks stay in the cache, and no answer is long enough to fill another."""
    computed, cached = (site.server.metric(name) for name in ("vllm:prompt_tokens_total", "sluice_kv_blocks_cached"))
    site.ask("gamma", a_prompt(100), n=8)
    assert site.server.metric("vllm:prompt_tokens_total") - computed == 100
    eventually(lambda: site.server.metric("sluice_kv_blocks_cached") - cached == 100 // BLOCK)


def test_limits_count_the_prompt_of_several_answers_once(site: Site) -> None:
    before = left(site, "metered")
    site.ask("metered", a_prompt(100), n=8)
    after = left(site, "metered")
    assert {name: before[name] - after[name] for name in before} == {"input_tokens": 100, "output_tokens": 32}


def test_a_prompt_that_is_sent_several_times_counts_each_time_and_is_cached(site: Site) -> None:
    prompt = a_prompt(100)
    usage = site.ask("gamma", [prompt] * 3).usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (300, 200)


def test_answers_to_several_prompts_are_told_prompt_by_prompt(site: Site) -> None:
    prompts = [a_prompt(20), a_prompt(40)]
    reply = site.ask("gamma", prompts, n=2, seed=5, temperature=2)
    each = [site.ask("beta", prompt, seed=5 + n, temperature=2).choices[0].text for prompt in prompts for n in range(2)]
    assert [choice.text for choice in reply.choices] == each
    assert reply.usage.prompt_tokens == 60


def test_a_streamed_chat_has_all_answers_and_one_usage(site: Site) -> None:
    said: list[Any] = [{"role": "user", "content": "Count from 3 to 12."}]
    asked: dict[str, Any] = {"model": MODEL, "messages": said, "temperature": 0, "n": 3}
    with site.client("gamma") as client:
        whole = client.chat.completions.create(**asked)
        *chunks, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    texts: Counter[int] = Counter()
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        texts[chunk.choices[0].index] += 1
    assert list(pieces.values()) == [choice.message.content for choice in whole.choices]
    assert len(set(pieces.values())) == 1 and min(texts.values()) > 10
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_client_that_leaves_ends_all_answers(site: Site) -> None:
    with site.client("gamma") as client:
        stream = client.completions.create(
            model=MODEL, prompt=a_prompt(40), n=4, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    eventually(lambda: site.server.metric("vllm:num_requests_running") == 0)


def test_no_request_has_more_answers_than_any(site: Site) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        site.ask("gamma", [[5], [6]], n=65)
    assert caught.value.param == "n" and "128" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="queued_requests is 2"):
        site.ask("queued", [5, 6], n=3)

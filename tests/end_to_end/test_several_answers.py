"""Several answers to one prompt cost one prefill, and the prompt counts once: the official client at a live server."""

import random
from collections import Counter
from typing import Any

import openai
import pytest

from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import eventually
from tests.gateway.tenant_site import TenantSite, site_fixture

MODEL = "embedded"
BLOCK = 16
POLICY = """
tenants:
  gamma: {}
  alone: {}
  metered: {limits: {input_tokens: 100k/day, output_tokens: 100k/day}}
  queued: {limits: {queued_requests: 2}}
"""


class Site(TenantSite):
    def ask(self, tenant: str, prompt: Any, **fields: Any) -> Any:
        """Four tokens that continue a prompt, or more answers to it."""
        extra = {"ignore_eos": True} | fields.pop("extra_body", {})
        asked = {"model": MODEL, "max_tokens": 4, "temperature": 2} | fields
        with self.client(tenant) as client:
            reply = client.completions.create(prompt=prompt, extra_body=extra, **asked)
            return list(reply) if isinstance(reply, openai.Stream) else reply

    def left(self, tenant: str) -> dict[str, int]:
        return {resource: entry["remaining"] for resource, entry in self.limits(tenant).items()}


site = site_fixture(Site, POLICY, "--refused-per-second", "10000", workers=NUMBERS_OF_WORKERS)


def a_prompt(length: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [random.randrange(5, 500) for _ in range(length)]


@pytest.mark.parametrize("length", [5, 96, 100, 1000])
def test_each_answer_is_that_of_its_seed_alone(site: Site, length: int) -> None:
    prompt = a_prompt(length)
    reply = site.ask("gamma", prompt, n=4, seed=11, max_tokens=16)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    alone = [site.ask("alone", prompt, seed=11 + n, max_tokens=16).choices[0].text for n in range(4)]
    assert [choice.text for choice in reply.choices] == alone and len(set(alone)) > 1
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (length, 64, 0)


def test_the_prompt_is_computed_once_and_held_once(site: Site) -> None:
    """Its full blocks stay in the cache, and no answer is long enough to fill another."""
    computed, cached = (site.server.metric(name) for name in ("vllm:prompt_tokens_total", "sluice_kv_blocks_cached"))
    site.ask("gamma", a_prompt(100), n=8)
    assert site.server.metric("vllm:prompt_tokens_total") - computed == 100
    eventually(lambda: site.server.metric("sluice_kv_blocks_cached") - cached == 100 // BLOCK)


def test_limits_count_the_prompt_once(site: Site) -> None:
    prompt, before = a_prompt(100), site.left("metered")
    site.ask("metered", prompt, n=8)
    after = site.left("metered")
    assert {name: before[name] - after[name] for name in before} == {"input_tokens": 100, "output_tokens": 32}


def test_a_prompt_that_is_sent_several_times_counts_each_time_and_is_cached(site: Site) -> None:
    prompt = a_prompt(100)
    usage = site.ask("gamma", [prompt] * 3).usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (300, 200)


def test_answers_to_several_prompts_are_told_prompt_by_prompt(site: Site) -> None:
    prompts = [a_prompt(20), a_prompt(40)]
    reply = site.ask("gamma", prompts, n=2, seed=5)
    each = [site.ask("alone", prompt, seed=5 + n).choices[0].text for prompt in prompts for n in range(2)]
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

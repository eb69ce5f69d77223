"""What a policy says of classes, limits, keys and prices holds in a simulation as it does live."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content
from labs.simulation.device import DEVICES
from labs.simulation.recording import NO_FACTS, TraceFacts
from labs.simulation.study import simulate_run
from labs.simulation.summary import Summary
from labs.what_if.comparison import simulated
from labs.what_if.simulated_policy import SOME_DAY
from tests.quotas.policies import parsed

DEVICE = DEVICES["llama3-8b-a100"]
CLASSES = "classes: {fast: {service_tiers: [priority], ttft: 1s}, usual: {ttft: 4s}, bulk: {service_tiers: [flex]}}\n"


def served(text: str, arrivals: Iterable[Arrival], facts: TraceFacts = NO_FACTS, **engine: Any) -> Summary:
    policy = simulated("policy", parsed(text), DEVICE, facts)
    policy = replace(policy, engine=replace(policy.engine, **engine))
    return simulate_run(policy, list(arrivals), DEVICE, None)


def every(seconds: float, count: int, **said: Any) -> list[Arrival]:
    return [Arrival(n * seconds, 100, 20, tenant="acme", **said) for n in range(count)]


def by_class(summary: Summary) -> dict[str, int]:
    return {level.name: level.offered for level in summary.classes}


def test_a_class_that_is_asked_for_by_number_is_no_higher_than_its_tenants() -> None:
    asks = [*every(0.1, 2, asked_class=0), *every(0.1, 2, asked_class=2), *every(0.1, 2, asked_class=9)]
    asks.sort(key=lambda arrival: arrival.time)
    assert by_class(served(CLASSES + "defaults: {highest_class: usual}", asks)) == {"usual": 2, "bulk": 4}


def test_a_class_that_a_key_may_not_have_is_refused() -> None:
    asks = [*every(0.1, 2, key="k1"), *every(0.1, 3, key="k1", service_tier="priority")]
    asks.sort(key=lambda arrival: arrival.time)
    summary = served(CLASSES + "tenants: {acme: {default_class: usual, keys: {k1: {classes: [bulk]}}}}", asks)
    assert (by_class(summary)["bulk"], summary.refusals) == (2, {"classes": 3})


def test_a_request_is_good_that_keeps_the_targets_of_its_class() -> None:
    text = "classes: {quick: {service_tiers: [fast], ttft: 1ms}, patient: {ttft: 1h}, any: {service_tiers: [flex]}}"
    asks = sorted(
        [a for tier in ("fast", None, "flex") for a in every(0.5, 4, service_tier=tier)], key=lambda a: a.time
    )
    summary = served(f"{text}\ndefaults: {{default_class: patient}}", asks)
    assert [(level.name, level.goodput) for level in summary.classes] == [("quick", 0), ("patient", 1), ("any", 1)]
    assert summary.goodput == pytest.approx(2 / 3)


def test_tokens_are_reserved_as_declared_and_come_back_when_the_answer_is_shorter() -> None:
    """Of 1,000 a day: 500 are reserved and 120 used. Two fit at once, eight one after another."""
    at_once = [Arrival(n * 1e-6, 100, 20, tenant="acme", max_tokens=400) for n in range(9)]
    apart = [arrival._replace(time=10.0 * n) for n, arrival in enumerate(at_once)]
    limits = "defaults: {limits: {tokens: 1k/day}}"
    assert served(limits, at_once).completed == 2
    assert served(limits, apart).completed == 5  # then 400 are left
    assert served(limits, apart).refusals == {"tokens/day": 4}


def test_a_budget_begins_anew_with_its_day_of_the_calendar() -> None:
    asks = every(3600.0, 30)
    noon = NO_FACTS._replace(began=SOME_DAY + 12 * 3600)
    assert served("defaults: {limits: {requests: 5/day}}", asks).completed == 10
    assert served("defaults: {limits: {requests: 5/day}}", asks, noon).completed == 10
    assert served("defaults: {limits: {requests: 5/day}}", asks[:13], noon).completed == 6
    assert served("defaults: {limits: {requests: 5/day}}", asks[:13]).completed == 5


def test_kv_memory_pauses_what_does_not_fit_and_refuses_what_never_could() -> None:
    """131,072 bytes a token: room for 256."""
    text = "tenants: {acme: {limits: {kv_bytes: 32MiB}}}"
    asks = [Arrival(n * 1e-6, 100, 28, tenant="acme") for n in range(6)]
    alone = served(text, asks[:1]).seconds
    summary = served(text, [*asks, Arrival(1e-3, 300, 20, tenant="acme")])
    assert summary.completed == 6 and summary.refusals == {"kv_bytes": 1}
    assert summary.seconds > 2 * alone > served("tenants: {acme: {}}", asks).seconds


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("{scopes: [limits]}", "scopes"),
        ("{models: [other]}", "models"),
        ("{expires: 2024-01-01T00:00:02Z}", "key has expired"),
    ],
)
def test_a_request_beyond_its_keys_rights_is_refused(key: str, reason: str) -> None:
    facts = TraceFacts(model="one", began=SOME_DAY)
    summary = served(f"tenants: {{acme: {{keys: {{k1: {key}}}}}}}", every(1.0, 4, key="k1"), facts)
    assert summary.refusals == {reason: 2 if "expires" in key else 4}


def test_an_answer_of_undeclared_length_reserves_as_it_goes_and_ends_with_its_budget() -> None:
    """1,000 tokens a day; 150 of prompt and 900 of answer are more than that."""
    undeclared = Arrival(0.0, 150, 900, tenant="acme", max_tokens=5000, is_declared=False)
    cut = served("defaults: {limits: {tokens: 1k/day}}", [undeclared])
    assert cut.refusals == {"tokens/day, while answering": 1} and cut.completed == 0
    assert served("defaults: {limits: {tokens: 1100/day}}", [undeclared]).completed == 1
    declared = undeclared._replace(is_declared=True)
    refused = served("defaults: {limits: {tokens: 1100/day}}", [declared])
    assert refused.refusals == {"tokens/day, which never holds as much": 1}


def test_an_answer_of_undeclared_length_stands_still_until_its_rate_has_refilled() -> None:
    """It begins with what is left of the burst, and then has 10 tokens a second."""
    undeclared = Arrival(0.0, 100, 900, tenant="acme", max_tokens=5000, is_declared=False)
    slow = served("defaults: {limits: {tokens: {rate: 10/s, burst: 500}}}", [undeclared])
    quick = served("defaults: {limits: {tokens: {rate: 10k/s, burst: 500}}}", [undeclared])
    assert slow.completed == quick.completed == 1
    assert slow.seconds > 45 > quick.seconds


def test_several_prompts_are_one_request_to_its_limits_and_refused_together() -> None:
    one = Arrival(0.0, 100, 20, tenant="acme", more_prompts=((50, 10, 10), (60, 10, 10)))
    asks = [one._replace(time=10.0 * n) for n in range(4)]
    summary = served("defaults: {limits: {requests: 3/day, tokens: 1k/day}}", asks)
    assert summary.offered == 12 and summary.completed == 9 and summary.refusals == {"requests/day": 3}
    assert served("defaults: {limits: {tokens: 250/day}}", asks).completed == 3
    assert served("tenants: {acme: {limits: {queued_requests: 2}}}", asks).refusals == {"queued_requests": 12}


def test_a_prompt_with_several_answers_counts_once_for_its_limits() -> None:
    one = Arrival(0.0, 100, 20, tenant="acme", more_prompts=((100, 20, 20),) * 3, num_answers=4)
    asks = [one._replace(time=10.0 * n) for n in range(4)]
    assert served("defaults: {limits: {input_tokens: 300/day}}", asks).completed == 3 * 4


def test_a_policy_without_limits_changes_nothing_but_what_it_says() -> None:
    asks = every(0.05, 200)
    plain = served("tenants: {acme: {}}", asks)
    unlimited = served("tenants: {acme: {limits: {requests: 1M/s, tokens: 1B/s}}}", asks)
    assert replace(plain, spend={}) == replace(unlimited, spend={})


BLOCK_BYTES = 131_072 * 16  # of the device's model


def turns(tenant: str, session: int, seconds: float, count: int, **said: Any) -> list[Arrival]:
    """A conversation of which each turn begins with the one before."""
    content = Content.of_session(session)
    return [Arrival(seconds * (n + 1), 320, 16, tenant=tenant, content=content, **said) for n in range(count)]


def flood(seconds: float, count: int) -> list[Arrival]:
    """Another tenant's requests, each with contents of its own that it leaves in the cache."""
    return [Arrival(seconds * n, 400, 16, tenant="flood", content=Content.of_session(1000 + n)) for n in range(count)]


def hits(summary: Summary) -> dict[str, float]:
    return {tenant.name: round(tenant.hit_rate, 2) for tenant in summary.tenants}


def test_a_floor_keeps_what_a_tenant_has_cached_under_the_flood_of_another() -> None:
    arrivals = sorted([*turns("acme", 1, 10.0, 6), *flood(0.25, 240)])
    small = {"num_blocks": 120, "max_model_len": 1024}
    without = served("tenants: {acme: {}, flood: {}}", arrivals, **small)
    kept = served(
        f"tenants: {{acme: {{prefix_cache: {{floor: {30 * BLOCK_BYTES}B}}}}, flood: {{}}}}", arrivals, **small
    )
    assert hits(without) == {"acme": 0.0, "flood": 0.0} and without.evictions > 1000
    assert hits(kept)["acme"] == round(5 * 304 / (6 * 320), 2), (
        "each turn but the first, but for its last token's block"
    )
    large = served("tenants: {acme: {}, flood: {}}", arrivals, num_blocks=20_000, max_model_len=1024)
    assert hits(large)["acme"] == hits(kept)["acme"] and not large.evictions


def test_a_ceiling_bounds_what_a_tenant_leaves_in_the_cache() -> None:
    bounded = served("defaults: {prefix_cache: {ceiling: 0B}}", turns("acme", 1, 10.0, 6))
    assert hits(bounded) == {"acme": 0.0} and bounded.evictions


def test_cached_prompt_tokens_cost_what_the_policy_says_of_them() -> None:
    price = "defaults: {price: {input: 1000/1k, cached_input: 250/1k, output: 0/1k, currency: EUR}}"
    summary = served(price, turns("acme", 1, 10.0, 2))
    assert summary.spend == {"EUR": 320 + 16 + 304 / 4}

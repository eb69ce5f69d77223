from collections.abc import Mapping
from dataclasses import fields, replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quotas.policy.limit import MAX_AMOUNT, MAX_RATE, Budget, BudgetPeriod, Calendar, Limit, Rate, Resource, Window
from quotas.policy.policy import (
    DEFAULTS,
    SERVICE_TIERS,
    BatchLimits,
    CacheLimits,
    ClassPolicy,
    GuardrailPolicy,
    KeyPolicy,
    Policy,
    Price,
    StoredResponseLimits,
    TeamPolicy,
    TenantPolicy,
    Unnamed,
    UsageDetail,
)
from tests.examples import examples
from tests.quotas.policies import parsed, policies

CLASSES = (
    ClassPolicy("fast", 0, ("fast", "priority")),
    ClassPolicy("plain", 1, ("scale",)),
    ClassPolicy("slow", 2, ("flex",)),
)
TOKENS = Limit(Resource.TOKENS, 1000, Rate(60, 200))
OF_KEY = Limit(Resource.TOKENS, 100, Rate(60, 100), key="k1")


def policy(tenant: TenantPolicy) -> Policy:
    return Policy.of(CLASSES, TenantPolicy("", "plain", "slow"), {tenant.name: tenant})


def class_of(service_tier: str | None, highest: str, default: str, key_highest: str | None = None) -> str:
    tenant = TenantPolicy("acme", highest, default, keys={"k1": KeyPolicy("k1", highest_class=key_highest)})
    return policy(tenant).class_for("acme", "k1", service_tier).name


@pytest.mark.parametrize("service_tier", [None, "auto", "default"])
def test_a_request_that_asks_for_no_tier_gets_its_tenants_default_class(service_tier: str | None) -> None:
    assert class_of(service_tier, "fast", "plain") == "plain"


def test_a_tier_is_served_by_the_class_that_names_it() -> None:
    assert [class_of(tier, "fast", "plain") for tier in ("fast", "priority", "scale", "flex")] == [
        "fast", "fast", "plain", "slow",
    ]  # fmt: skip


def test_a_tier_that_no_class_names_is_the_default_class() -> None:
    tenant = TenantPolicy("acme", "only", "only")
    one = Policy.of((ClassPolicy("only", 0),), tenant)
    assert {one.class_for("acme", None, tier).name for tier in SERVICE_TIERS} == {"only"}


def test_no_request_is_served_above_the_tenants_and_the_keys_class() -> None:
    assert class_of("fast", "plain", "slow") == "plain"
    assert class_of("fast", "fast", "fast", key_highest="slow") == "slow"
    assert class_of(None, "fast", "fast", key_highest="plain") == "plain"


def test_a_tenant_that_is_not_named_has_the_defaults() -> None:
    found = policy(TenantPolicy("acme", "fast", "fast"))
    assert found.tenant("other") is found.default
    assert found.class_for("other", "any", "fast").name == "plain"


def test_a_keys_limits_hold_besides_its_tenants() -> None:
    tenant = TenantPolicy("acme", "fast", "fast", limits=(TOKENS,), keys={"k1": KeyPolicy("k1", limits=(OF_KEY,))})
    assert tenant.limits_of("k1") == (TOKENS, OF_KEY)
    assert tenant.limits_of("k2") == tenant.limits_of() == (TOKENS,)


def test_limits_have_names_that_are_unique_and_stable() -> None:
    limits = [
        TOKENS,
        OF_KEY,
        Limit(Resource.REQUESTS, 5, Rate(1, 5)),
        Limit(Resource.REQUESTS, 5, Rate(3600, 5)),
        Limit(Resource.REQUESTS, 5, Budget(BudgetPeriod.MONTH)),
        Limit(Resource.KV_BYTES, 5),
        Limit(Resource.CONCURRENT_REQUESTS, 5, key="k1"),
    ]
    assert [limit.name for limit in limits] == [
        "tokens/min",
        "key:k1:tokens/min",
        "requests/s",
        "requests/h",
        "requests/month",
        "kv_bytes",
        "key:k1:concurrent_requests",
    ]


def test_a_limit_can_hold_its_burst_or_its_amount() -> None:
    assert TOKENS.capacity == 200
    assert Limit(Resource.TOKENS, 7, Budget(BudgetPeriod.DAY)).capacity == Limit(Resource.KV_BYTES, 7).capacity == 7


@pytest.mark.parametrize(
    ("resource", "amount", "window"),
    [
        (Resource.TOKENS, 1, None),
        (Resource.KV_BYTES, 1, Budget(BudgetPeriod.DAY)),
        (Resource.TOKENS, 0, Budget(BudgetPeriod.DAY)),
        (Resource.QUEUED_REQUESTS, -1, None),
        (Resource.KV_BYTES, MAX_AMOUNT + 1, None),
        (Resource.TOKENS, MAX_AMOUNT + 1, Budget(BudgetPeriod.DAY)),
        (Resource.TOKENS, MAX_RATE + 1, Rate(60, 1)),
    ],
)
def test_a_limit_that_makes_no_sense_cannot_be_made(resource: Resource, amount: int, window: Window) -> None:
    with pytest.raises(ValueError, match=resource):
        Limit(resource, amount, window)


@pytest.mark.parametrize(("seconds", "burst"), [(61, 1), (60, 0), (60, MAX_RATE + 1)])
def test_a_rate_that_makes_no_sense_cannot_be_made(seconds: int, burst: int) -> None:
    with pytest.raises(ValueError, match=r"a (rate|burst) is"):
        Rate(seconds, burst)


def test_the_digest_of_a_key_is_not_in_its_repr() -> None:
    assert "c0ffee" not in repr(KeyPolicy("k1", hmac="c0ffee" * 10))


@settings(max_examples=examples(25), deadline=None)
@given(policies(), st.sampled_from([None, "auto", "default", *SERVICE_TIERS]))
def test_for_every_tier_the_class_is_allowed(found: Policy, service_tier: str | None) -> None:
    for name in (*found.tenants, "stranger"):
        tenant = found.tenant(name)
        for key_id in (*tenant.keys, None):
            served = found.class_for(name, key_id, service_tier)
            assert served.level >= found.class_named(tenant.highest_class).level
            key = tenant.key(key_id)
            assert not (key and key.highest_class) or served.level >= found.class_named(key.highest_class).level


@settings(max_examples=examples(25), deadline=None)
@given(policies())
def test_the_version_depends_on_the_content_alone(found: Policy) -> None:
    turned = dict(reversed(found.tenants.items()))
    groups = {group: members[::-1] for group, members in found.prefix_sharing.items()}

    def version(tenants: Mapping[str, TenantPolicy], unnamed: Unnamed, groups: Mapping[str, tuple[str, ...]]) -> str:
        return Policy.of(found.classes, found.default, tenants, unnamed, groups, found.teams).version

    assert version(turned, found.unnamed_tenants, groups) == found.version
    more = {**found.tenants, "one-more-tenant": found.default}
    assert version(more, found.unnamed_tenants, groups) != found.version
    (other,) = {"allow", "refuse"} - {found.unnamed_tenants}
    assert version(found.tenants, other, groups) != found.version
    assert version(found.tenants, found.unnamed_tenants, {**groups, "new": ("a", "b")}) != found.version
    more_teams = Policy.of(
        found.classes, found.default, found.tenants, found.unnamed_tenants, groups, {"": TeamPolicy("")}
    )
    assert more_teams.version != found.version


def test_another_value_of_any_field_is_another_version() -> None:
    """An edit that the version does not tell would not come into force. A new field needs a value here."""
    month, one = Limit(Resource.TOKENS, 5, Budget(BudgetPeriod.MONTH)), Decimal(1)
    price = Price(one, one, one, one, "EUR")
    others: dict[str, object] = {
        "name": "other", "highest_class": "slow", "default_class": "slow", "weight": 2.0, "models": ("other",),
        "limits": (TOKENS,), "on_store_outage": "closed", "price": price, "prefix_cache": CacheLimits(1),
        "stored_responses": StoredResponseLimits(1), "batches": BatchLimits(1), "usage": UsageDetail(()),
        "guardrail": GuardrailPolicy("http://guard"), "log_texts": "redacted", "max_n": 2, "max_schema_bytes": 2,
        "max_top_logprobs": 2, "default_adapter": "other", "calendar": Calendar("UTC", 1), "team": "other",
        "team_limits": (month,), "keys": {"k1": KeyPolicy("k1")},
    }  # fmt: skip
    plain = TenantPolicy("acme", "fast", "plain")
    assert others.keys() == {field.name for field in fields(TenantPolicy) if field.init}
    digests = [replace(plain, **{name: other}).digest for name, other in others.items()]
    assert len({plain.digest, *digests}) == 1 + len(others)


def test_a_tenant_finds_its_own_prefixes_and_its_groups() -> None:
    found = parsed("prefix_sharing: {x: [a, b], a: [c, d]}\ntenants: {a: , b: , c: , d: , alone: }")
    scopes = {tenant: found.cache_scope(tenant) for tenant in ("a", "b", "c", "d", "alone", "stranger")}
    assert scopes["a"] == scopes["b"] != scopes["c"] == scopes["d"]
    assert len({scopes[tenant] for tenant in ("a", "c", "alone", "stranger")}) == 4


def test_a_tenant_that_is_called_as_a_group_is_named_inside_finds_nothing_of_it() -> None:
    """No policy has such a name, but a key file could."""
    found = parsed("prefix_sharing: {x: [a, b]}\ntenants: {a: , b: , c: }")
    forged = [found.cache_scope("a"), found.cache_scope("c"), "group:x"]
    scopes = {found.cache_scope(tenant) for tenant in forged}
    assert len(scopes) == 3 and scopes.isdisjoint({found.cache_scope("a"), found.cache_scope("c")})


@pytest.mark.parametrize("after", ["x: [a, b]", "x: [a, c]", "y: [a, b, c]", ""])
def test_when_a_group_changes_its_earlier_prefixes_are_not_found(after: str) -> None:
    tenants = "\ntenants: {a: , b: , c: }"
    before = parsed(f"prefix_sharing: {{x: [a, b, c]}}{tenants}")
    changed = parsed(f"prefix_sharing: {{{after}}}{tenants}")
    assert before.cache_scope("a") not in {changed.cache_scope(tenant) for tenant in "abc"}


def test_the_order_in_which_a_group_is_written_changes_nothing() -> None:
    one, other = (Policy.of(CLASSES, DEFAULTS, {}, "allow", {"x": members}) for members in (("a", "b"), ("b", "a")))
    assert one.cache_scope("a") == other.cache_scope("a")


def test_no_floor_is_kept_for_tenants_that_are_not_named() -> None:
    found = parsed("defaults: {prefix_cache: {floor: 1MiB, ceiling: 2MiB}}\ntenants: {a: }")
    assert found.cache_limits("a") == CacheLimits(2**20, 2**21)
    assert found.cache_limits("stranger") == CacheLimits(0, 2**21)

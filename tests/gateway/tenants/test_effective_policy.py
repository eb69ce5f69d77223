from dataclasses import replace

import pytest

from gateway.errors import ClassNotAllowed, Forbidden, KeySettingsInvalid, ModelNotFound, Unsatisfiable
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.policy.limit import Limit, Rate, Resource
from quotas.policy.policy import CLASSES, DEFAULTS, SCOPES, KeyPolicy, Policy, TenantPolicy, UsageDetail
from quotas.usage_row import row_of
from tests.quotas.policies import parsed


def effective(key: KeyPolicy | None = None, scopes: tuple[str, ...] = SCOPES, **tenant: object) -> EffectivePolicy:
    acme = replace(TenantPolicy("acme", "standard", "standard"), keys={key.id: key} if key else {}, **tenant)  # type: ignore[arg-type]
    return EffectivePolicy(Policy.of(CLASSES, DEFAULTS, {"acme": acme}), Principal("acme", "k1", scopes))


def test_a_key_that_the_policy_does_not_mention_may_do_what_its_tenant_may() -> None:
    effective().require("inference")
    effective().check_model("anything")


@pytest.mark.parametrize("scope", SCOPES)
def test_a_policy_may_refuse_tenants_that_it_does_not_name(scope: str) -> None:
    policy = Policy.of(CLASSES, DEFAULTS, {"acme": replace(DEFAULTS, name="acme")}, "refuse")
    EffectivePolicy(policy, Principal("acme", "k1")).require(scope)
    with pytest.raises(Forbidden, match=r"'acmee' is none of them: have the tenant named"):
        EffectivePolicy(policy, Principal("acmee", "k2")).require(scope)


def test_a_key_without_the_scope_is_told_which_it_has() -> None:
    with pytest.raises(Forbidden, match=r"inference.*limits"):
        effective(KeyPolicy("k1", scopes=("limits",))).require("inference")


def test_a_key_has_the_scopes_it_was_made_with_as_far_as_the_policy_leaves_them() -> None:
    effective(scopes=("inference",)).require("inference")
    with pytest.raises(Forbidden, match=r"for limits: its scopes are inference\."):
        effective(scopes=("inference",)).require("limits")
    widened = effective(KeyPolicy("k1", scopes=("inference", "limits")), scopes=("inference",))
    assert widened.scopes == ("inference",)
    apart = effective(KeyPolicy("k1", scopes=("limits",)), scopes=("inference",))
    for scope in SCOPES:
        with pytest.raises(Forbidden, match="its scopes are none"):
            apart.require(scope)


def test_a_model_that_is_not_allowed_looks_like_none() -> None:
    with pytest.raises(ModelNotFound):
        effective(models=("small",)).check_model("large")
    with pytest.raises(ModelNotFound):
        effective(KeyPolicy("k1", models=("small",))).check_model("large")


def test_the_highest_class_and_the_models_are_what_the_key_has_of_its_tenants() -> None:
    narrowed = effective(KeyPolicy("k1", models=("b",), highest_class="batch"), models=("a", "b"))
    assert (narrowed.highest_class.name, narrowed.models) == ("batch", {"b"})
    assert (effective().highest_class.name, effective().models) == ("standard", None)


@pytest.mark.parametrize(
    ("tier", "level"), [(None, 1), ("auto", 1), ("default", 1), ("flex", 2), ("priority", 1), ("fast", 1)]
)
def test_a_tier_is_served_up_to_what_the_tenant_may(tier: str | None, level: int) -> None:
    assert effective().service_class(tier).level == level


def test_cached_prefixes_are_found_within_a_tenants_group_with_any_key() -> None:
    names = ("acme", "acme-eu", "other")
    tenants = {name: replace(DEFAULTS, name=name) for name in names}
    policy = Policy.of(CLASSES, DEFAULTS, tenants, "allow", {"acme": ("acme", "acme-eu")})
    acme, acme_eu, other = (EffectivePolicy(policy, Principal(name, "k1", SCOPES)).cache_scope for name in names)
    assert acme == acme_eu
    assert len({acme, other, *names}) == 5, "no scope is called as a tenant"


def test_a_request_is_charged_to_all_limits_but_queues_and_kv_memory() -> None:
    running, of_key = Limit(Resource.CONCURRENT_REQUESTS, 4), Limit(Resource.TOKENS, 9, Rate(60, 9), key="k1")
    others = Limit(Resource.QUEUED_REQUESTS, 8), Limit(Resource.KV_BYTES, 2**30)
    limited = effective(KeyPolicy("k1", limits=(of_key,)), limits=(others[0], running, others[1]))
    assert limited.charged == (running, of_key)


def test_what_a_model_cannot_cost_refuses_no_request_unread() -> None:
    text = "price: {input: 1/1M, output: 2/1M, currency: USD%s}, limits: {cost: 1/day, concurrent_requests: 2}"
    names = []
    for models in ("", ", models: {free: {input: 0/1M, output: 0/1M}}"):
        policy = parsed("tenants: {acme: {" + text % models + "}}")
        limits = EffectivePolicy(policy, Principal("acme", "k1", SCOPES)).charged_unread
        names.append([limit.resource for limit in limits])
    assert names == [[Resource.COST, Resource.CONCURRENT_REQUESTS], [Resource.CONCURRENT_REQUESTS]]


def test_an_answer_of_undeclared_length_begins_with_what_is_expected_and_fits() -> None:
    assert effective().reservable(100, expected=50) is None
    tokens = Limit(Resource.TOKENS, 1000, Rate(60, 130))
    assert effective(limits=(tokens,)).reservable(100, expected=50) == 30
    assert effective(limits=(tokens,)).reservable(100, expected=20) == 20
    assert effective(limits=(tokens,)).reservable(500, expected=20) == 1
    of_key = Limit(Resource.OUTPUT_TOKENS, 40, Rate(60, 40), key="k1")
    assert effective(KeyPolicy("k1", limits=(of_key,))).reservable(100, expected=50) == 40


def test_a_tenant_may_have_fewer_answers_and_log_probabilities_than_others() -> None:
    policy = effective(max_n=4, max_top_logprobs=5, max_schema_bytes=100)
    policy.check_grammar(100, "response_format")
    with pytest.raises(Unsatisfiable, match=r"max_schema_bytes is 100: response_format has 101 bytes"):
        policy.check_grammar(101, "response_format")
    policy.check_answers(4, "n")
    policy.check_logprobs(5, "logprobs")
    policy.check_logprobs(None, "logprobs")
    with pytest.raises(Unsatisfiable, match=r"max_n is 4: best_of asks for 5 .* Lower best_of") as answers:
        policy.check_answers(5, "best_of")
    with pytest.raises(Unsatisfiable, match=r"max_top_logprobs is 5: top_logprobs asks for 6") as logprobs:
        policy.check_logprobs(6, "top_logprobs")
    assert (answers.value.param, logprobs.value.param) == ("best_of", "top_logprobs")


def with_settings(settings: str, key: KeyPolicy | None = None, **tenant: object) -> EffectivePolicy:
    acme = replace(TenantPolicy("acme", "interactive", "standard"), keys={key.id: key} if key else {}, **tenant)  # type: ignore[arg-type]
    return EffectivePolicy(Policy.of(CLASSES, DEFAULTS, {"acme": acme}), Principal("acme", "k1", settings=settings))


def test_a_keys_own_settings_narrow_what_its_tenant_and_the_policy_leave_it() -> None:
    of_policy = KeyPolicy("k1", models=("a", "b"), limits=(Limit(Resource.REQUESTS, 60, Rate(60, 60), "k1"),))
    own = "{limits: {requests: [30/min, 9/day], tokens: 1k/min}, models: [b, c], highest_class: standard}"
    narrowed = with_settings(own, of_policy, models=("a", "b", "c"))
    assert [(limit.name, limit.amount) for limit in narrowed.limits] == [
        ("key:k1:requests/min", 30),
        ("key:k1:requests/day", 9),
        ("key:k1:tokens/min", 1000),
    ]
    assert (narrowed.models, narrowed.highest_class.name) == ({"b"}, "standard")
    assert narrowed.service_class("priority").name == "standard", "as below a tenant's highest class"


def test_neither_the_rate_nor_the_burst_of_a_key_is_raised_by_its_own_settings() -> None:
    of_policy = KeyPolicy("k1", limits=(Limit(Resource.REQUESTS, 60, Rate(60, 5), "k1"),))
    (limit,) = with_settings("{limits: {requests: {rate: 30/min, burst: 1000}}}", of_policy).limits
    assert (limit.amount, limit.window) == (30, Rate(60, 5))


def test_a_request_is_charged_to_its_tenant_its_key_its_team_and_its_session_in_this_order() -> None:
    text = "teams: {x: {limits: {requests: 9/h}}}\ntenants: {acme: {team: x, limits: {tokens: [5k/session, 7k/h]}, "
    found = parsed(text + "keys: {k1: {limits: {tokens: 3k/h, requests: 4/day}}}}}")
    settings = '{"limits": {"tokens": "2k/h", "requests": {"budget": "1/day", "soft": true, "alerts": [ALERT]}}}'
    settings = settings.replace("ALERT", '{"at": "50%", "url": "https://a.example"}')
    policy = EffectivePolicy(found, Principal("acme", "k1", SCOPES, settings))
    amounts = {limit.name: limit.amount for limit in policy.charged_in("one")}
    assert amounts == {
        "tokens/h": 7000,
        "key:k1:requests/day": 4,  # a soft limit takes nothing from another one's bound
        "key:k1:tokens/h": 2000,
        "team:x:requests/h": 9,
        "tokens/session": 5000,
    }
    assert [limit.owner for limit in policy.charged_in("one")] == ["tenant", "key", "key", "team", "session"]
    (one,), (other,) = ({limit.session for limit in policy.charged_in(name)} - {None} for name in ("one", "two"))
    assert one != other and policy.charged_in(None) == policy.charged == policy.charged_in("one")[:-1]


def test_a_class_that_a_key_may_not_have_is_refused_by_the_tier_that_asks_for_it() -> None:
    only_batch = with_settings("{classes: [batch]}")
    assert [only_batch.service_class(tier).name for tier in (None, "auto", "flex")] == ["batch"] * 3
    with pytest.raises(ClassNotAllowed, match=r"class interactive: its classes are batch \(flex\)") as refused:
        only_batch.service_class("priority")
    assert (refused.value.status, refused.value.param) == (403, "service_tier")
    urgent = with_settings("{classes: [interactive]}")
    assert urgent.service_class(None).name == "interactive", "the only one that it may have"
    with pytest.raises(ClassNotAllowed, match="its classes are none"):
        with_settings("{highest_class: batch}", KeyPolicy("k1", classes=("interactive",))).service_class(None)


@pytest.mark.parametrize("settings", ["{limits: {cost: 5/month}}", "{classes: [gone]}", "{models: [x]}", "nonsense"])
def test_settings_that_the_policy_does_not_allow_any_more_let_nobody_in(settings: str) -> None:
    closed = with_settings(settings, models=("a",))
    with pytest.raises(KeySettingsInvalid, match="do not fit the policy in force"):
        closed.require("inference")


def test_use_is_told_apart_as_finely_as_the_tenant_asks() -> None:
    asked = {"project": "search", "other": "x", "depth": {"no": "text"}}
    fine = with_settings("", usage=UsageDetail(("metadata.depth", "metadata.project", "session", "user"), 9))
    assert fine.usage_row("m", "batch", "ada", asked, None) == "9 k1|m|batch|ada|project=search"
    row = row_of(fine.usage_row("m", "batch", "ada", asked, "s 1|2").partition(" ")[2])
    assert [row.part(by) for by in ("user", "session", "metadata.project", "metadata.session")] == [
        "ada",
        "s 1|2",
        "search",
        "",
    ]
    coarse = with_settings("", usage=UsageDetail(("metadata.x",)))
    assert coarse.usage_row("m", "batch", "ada", asked, "s1") == "k1|m|batch"
    assert "secret" not in fine.usage_row("m", "batch", "sk-sluice-77777777-secret", {}, None)

"""Settings of a key beside the policy's entry for it."""

import pytest

from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.policy.key_settings import both, read_key_settings
from quotas.policy.policy_file import PolicyError, parse_policy

POLICY = """
tenants:
  acme:
    keys:
      one: {models: [a, b], classes: [standard, batch], limits: {requests: 10/min, concurrent_requests: 5}}
"""


@pytest.mark.parametrize(
    "own",
    [
        "{}",
        "{models: [b, c]}",
        "{classes: [batch]}",
        "{classes: [interactive, batch]}",
        "{limits: {requests: 20/min, concurrent_requests: 2}}",
        "{limits: {tokens: 1k/day}}",
    ],
)
def test_a_policy_with_both_in_one_entry_serves_as_the_two_beside_each_other(own: str) -> None:
    policy = parse_policy({"policy.yaml": POLICY.encode()})
    beside = EffectivePolicy(policy, Principal("acme", "one", settings=own))
    entry = policy.tenant("acme").key("one")
    assert entry is not None
    joined = both(entry, read_key_settings(own, "one", policy, "acme"), policy)
    policy.tenants["acme"].keys["one"] = joined  # type: ignore[index]
    as_one = EffectivePolicy(policy, Principal("acme", "one"))
    assert (as_one.models, as_one.limits) == (beside.models, beside.limits)
    assert as_one.classes == beside.classes


def test_settings_without_a_class_of_the_policys_entry_are_a_problem_of_the_key() -> None:
    policy = parse_policy({"policy.yaml": POLICY.encode()})
    with pytest.raises(PolicyError, match="leaves the key none: the policy's own entry for it has standard, batch"):
        read_key_settings("{classes: [interactive]}", "one", policy, "acme")
    served = EffectivePolicy(policy, Principal("acme", "one", settings="{classes: [interactive]}"))
    assert served.problem is not None

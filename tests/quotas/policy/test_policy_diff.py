from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quotas.policy import policy_diff as module
from quotas.policy.policy import Policy
from quotas.policy.policy_diff import PolicyEdit, changed_tenants, policy_diff
from quotas.policy.problems import MAX_COMPARED_WORDS, did_you_mean
from tests.examples import examples
from tests.quotas.policies import parsed, policies


def test_tenants_differ_by_their_content() -> None:
    old = parsed("tenants: {a: {weight: 2}, b: {keys: {k: {scopes: [limits]}}}, c: , gone: }")
    new = parsed("tenants: {a: {weight: 3}, b: {keys: {k: {scopes: [inference]}}}, c: {weight: 1}, came: }")
    for _ in range(2):  # the second is remembered
        assert changed_tenants(old, new) == ["a", "b", "came", "gone"]
    assert (
        changed_tenants(new, new)
        == changed_tenants(old, parsed("tenants: {gone: , c: , b: {keys: {k: {scopes: [limits]}}}, a: {weight: 2}}"))
        == []
    )
    assert changed_tenants(None, new) == ["a", "b", "c", "came"]


@settings(max_examples=examples(12, at_night=500), deadline=None)
@given(st.lists(policies(), min_size=2, max_size=4))
def test_an_edit_makes_the_later_policy_of_the_earlier_one_and_of_itself(editions: list[Policy]) -> None:
    for old, new in pairwise(editions):
        edit = PolicyEdit.between(old, new)
        assert edit.of(old) == edit.of(new) == new


def test_the_diff_of_policies_of_many_tenants_reads_changed_ones_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    write = module.tenant_fields
    monkeypatch.setattr(module, "tenant_fields", lambda tenant: written.append(tenant.name) or write(tenant))
    names = ", ".join(f"t{number}: " for number in range(500))
    old, new = parsed(f"tenants: {{{names}, x: {{weight: 2}}}}"), parsed(f"tenants: {{{names}, x: {{weight: 3}}}}")
    assert policy_diff(old, new) == ["tenant x", "  weight: 2 -> 3"]
    assert written == ["", "", "x", "x"]
    written.clear()
    other = parsed(f"defaults: {{weight: 7}}\ntenants: {{{names}}}")
    assert len(policy_diff(old, other, 6)) == 6
    assert len(written) < 10


def test_an_alerts_receiver_is_told_by_its_host_and_still_told_from_another() -> None:
    text = "tenants: {a: {limits: {tokens: {budget: 1k/day, alerts: [{at: 50%, url: https://a.example/PATH}]}}}}"
    old, new = (parsed(text.replace("PATH", path)) for path in ("s3cret", "an0ther"))
    heading, change = policy_diff(old, new)
    assert heading == "tenant a" and change.count("50% to a.example (") == 2
    assert "s3cret" not in change and "an0ther" not in change


@pytest.mark.parametrize("slip", ["t00x7", "t00O7", "t0007x", "T0007", "t0007", "0t007", "t000.7", "t00"])
def test_a_slip_is_told_from_many_names_as_it_is_from_few(slip: str) -> None:
    names = {f"t{number:04}" for number in range(MAX_COMPARED_WORDS)}
    few = did_you_mean(slip, names)
    many = did_you_mean(slip, names | {f"other-{number}" for number in range(MAX_COMPARED_WORDS)})
    assert few and (many or slip in ("t00O7", "t00"))


def test_of_many_names_none_is_compared_letter_by_letter() -> None:
    class Names(set[str]):
        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError

    names = Names(f"t{number:05}" for number in range(MAX_COMPARED_WORDS + 1))
    assert did_you_mean("t00O07x", names) == ""
    assert did_you_mean("t0007", names) == '; did you mean "t00007"?'

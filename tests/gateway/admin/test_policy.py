import json
from pathlib import Path
from typing import Any

import pytest

from gateway.admin import policy
from gateway.admin.policy import MAX_POLICY_BYTES, PastedPolicy, PolicyCheck, effective, policy_report
from gateway.errors import RequestTooLarge
from gateway.tenants.live_policy import MAX_CHANGE_LINES, LivePolicy
from quotas.policy import policy_text
from quotas.policy.policy import Policy, TenantPolicy
from quotas.policy.policy_file import parse_policy

HASH = "ab" * 32
POLICY = f"""
tenants:
  acme: {{weight: 3, keys: {{k1: {{hmac: {HASH}, limits: {{requests: 5/min}}}}}}}}
"""
CURRENT = parse_policy({"policy.yaml": POLICY.encode()})


@pytest.fixture
def check() -> PolicyCheck:
    return PolicyCheck()


async def test_changes_of_a_valid_edit_are_told_as_in_the_diff(check: PolicyCheck) -> None:
    report = await check.of(PastedPolicy(text=POLICY.replace("weight: 3", "weight: 4")), CURRENT)
    assert report["valid"]
    assert report["changes"] == ["tenant acme", "  weight: 3 -> 4"]
    assert (report["tenants"], report["truncated"]) == (1, 0)


async def test_of_a_pinned_prompt_the_beginning_is_told_and_what_tells_it_from_others(check: PolicyCheck) -> None:
    prompts = [f"You answer questions about {what}. {'Be brief. ' * 40}" for what in ("law", "tax")]
    edits = [f"tenants: {{acme: {{prefix_cache: {{pinned: ['{prompt}']}}}}}}" for prompt in prompts]
    before = parse_policy({"policy.yaml": edits[0].encode()})
    (_, change) = (await check.of(PastedPolicy(text=edits[1]), before))["changes"]
    beginning = prompts[0][:25]
    assert change.startswith(f"  prefix_cache.pinned: {beginning}") and change.count("(432 characters, ") == 2
    assert len(change) < 200 and len({*change.split(" -> ")}) == 2
    (shown,) = effective(before, ["acme"])["tenants"]["acme"]["prefix_cache"]["pinned"]
    assert shown.startswith(beginning) and len(shown) < 100


async def test_a_policy_error_is_told_with_its_line(check: PolicyCheck) -> None:
    report = await check.of(PastedPolicy(text="tenants:\n  acme: {wieght: 3}\n  b: {weight: -1}\n"), CURRENT)
    assert not report["valid"]
    places = [(problem["line"], problem["path"]) for problem in report["problems"]]
    assert places == [(2, "tenants.acme"), (3, "tenants.b.weight")]


async def test_a_key_that_was_pasted_into_a_policy_is_not_repeated(check: PolicyCheck) -> None:
    key = f"sk-sluice-{'7' * 40}"
    text = f"tenants:\n  acme: {{{key}: 3, keys: {{k1: {{hmac: {key}}}}}}}\n  {key}: {{weight: x}}\n"
    report = await check.of(PastedPolicy(text=text), CURRENT)
    assert (len(report["problems"]), "7777" in str(report)) == (3, False)


async def test_a_limit_beyond_this_gateway_is_told_with_its_line(check: PolicyCheck) -> None:
    def find(policy: Policy) -> list[tuple[str, str]]:
        return [("tenants.b.prefix_cache.floor", "leaves no room")]

    pasted = PastedPolicy(text="tenants:\n  b:\n    prefix_cache: {floor: 1GiB}\n")
    report = await check.of(pasted, CURRENT, [find])
    (problem,) = report["problems"]
    assert not report["valid"]
    assert problem == {"line": 3, "column": 20, "path": "tenants.b.prefix_cache.floor", "message": "leaves no room"}


async def test_the_policy_in_force_as_text_is_an_edit_that_changes_nothing_and_tells_no_hash(
    check: PolicyCheck,
) -> None:
    told = await check.text(CURRENT)
    assert told["version"] == CURRENT.version
    assert HASH not in told["text"]
    report = await check.of(PastedPolicy(text=told["text"]), CURRENT)
    assert (report["valid"], report["changes"]) == (True, [])


async def test_a_policy_that_is_too_long_is_left_to_the_command(check: PolicyCheck) -> None:
    with pytest.raises(RequestTooLarge, match="sluice policy check"):
        await check.of(PastedPolicy(text="#" * (MAX_POLICY_BYTES + 1)), CURRENT)


async def test_of_many_changes_the_first_are_told_and_the_rest_counted(check: PolicyCheck) -> None:
    many = "tenants:\n" + "".join(f"  t{number}: {{weight: 2}}\n" for number in range(MAX_CHANGE_LINES))
    report = await check.of(PastedPolicy(text=many), CURRENT)
    assert len(report["changes"]) == MAX_CHANGE_LINES
    assert report["truncated"] > MAX_CHANGE_LINES


@pytest.mark.parametrize(
    "text", ["", "\x00", "a: &a [*a, *a]", "&a [" * 2000, "\ufeff", "tenants: !!python/object:os.system {}"]
)
async def test_a_text_that_is_no_policy_has_problems_and_no_effect(check: PolicyCheck, text: str) -> None:
    assert (await check.of(PastedPolicy(text=text), CURRENT))["problems"]


ONE, TWO = "a" * 64, "b" * 64
KEYS = "tenants:\n  acme:\n    keys:\n      k1: {{hmac: {}, expires: 2030-01-01}}\n"


async def test_no_hash_of_a_key_is_in_the_policy_or_in_its_history(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(KEYS.format(ONE))
    policies = LivePolicy(path)
    path.write_text(KEYS.format(TWO).replace("2030", "2031"))
    await policies.reload()
    report = await policy_report(policies)
    text = json.dumps(report)
    assert ONE not in text and TWO not in text
    assert report["effective"]["tenants"]["acme"]["keys"]["k1"]["expires"].startswith("2031")
    assert any("expires" in line for line in report["history"][0]["changes"])


async def test_an_edit_that_is_not_valid_is_told_beside_what_holds(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("tenants: {acme: {weight: 2}}\n")
    policies = LivePolicy(path)
    path.write_text("tenants: {acme: {wieght: 2}}\n")
    await policies.reload()
    report = await policy_report(policies)
    assert "wieght" in report["problem"]
    assert report["effective"]["tenants"]["acme"]["weight"] == 2
    assert len(report["history"]) == 1


def large(number: int) -> Policy:
    return parse_policy({"p": ("tenants:\n" + "".join(f"  t{index:05}:\n" for index in range(number))).encode()})


async def test_of_many_tenants_the_first_are_written_out_and_the_others_found_by_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.yaml").write_text("tenants:\n" + "".join(f"  t{index:05}:\n" for index in range(9000)))
    policies = LivePolicy(tmp_path / "p.yaml")
    written: list[str] = []
    write = policy.tenant_fields

    def counted(tenant: TenantPolicy) -> dict[str, Any]:
        written.append(tenant.name)
        return write(tenant)

    monkeypatch.setattr(policy, "tenant_fields", counted)
    report = await policy_report(policies)
    assert (report["named"], report["truncated"], len(report["effective"]["tenants"])) == (9000, 8500, 500)
    assert len(written) == 501, "and the defaults"
    found = await policy_report(policies, "T0812")
    assert [*found["effective"]["tenants"]] == [f"t0812{digit}" for digit in range(10)]
    assert (found["named"], found["truncated"]) == (9000, 0)


@pytest.mark.parametrize(("number", "most"), [(9000, 0), (700, 620)])
async def test_a_policy_that_is_too_long_to_be_edited_is_not_written_out_to_its_end(
    check: PolicyCheck, monkeypatch: pytest.MonkeyPatch, number: int, most: int
) -> None:
    written: list[str] = []
    write = policy_text.tenant_fields

    def counted(tenant: TenantPolicy) -> dict[str, Any]:
        written.append(tenant.name)
        return write(tenant)

    monkeypatch.setattr(policy_text, "tenant_fields", counted)
    assert (await check.text(large(number)))["text"] is None
    assert len(written) <= most


async def test_the_lines_of_an_edit_that_are_left_out_are_counted_up_to_a_bound(
    check: PolicyCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MAX_COUNTED_LINES", 70)
    report = await check.of(PastedPolicy(text="tenants:\n  other:\n"), large(3000))
    assert (len(report["changes"]), report["truncated"]) == (MAX_CHANGE_LINES, 70)

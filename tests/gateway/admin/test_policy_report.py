"""The policy as an admin reads it: all of it, and no hash of a key."""

import json
from pathlib import Path

from gateway.admin.policy_report import policy_report
from gateway.policies import Policies

ONE, TWO = "a" * 64, "b" * 64
KEYS = "tenants:\n  acme:\n    keys:\n      k1: {{hmac: {}, expires: 2030-01-01}}\n"


async def test_no_hash_of_a_key_is_in_the_policy_or_in_its_history(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    _write(path, KEYS.format(ONE))
    policies = Policies(path)
    _write(path, KEYS.format(TWO).replace("2030", "2031"))
    await policies.reload()
    report = await policy_report(policies)
    text = json.dumps(report)
    assert ONE not in text and TWO not in text
    assert report["effective"]["tenants"]["acme"]["keys"]["k1"]["expires"].startswith("2031")
    assert any("expires" in line for line in report["history"][0]["changes"])


async def test_an_edit_that_is_not_valid_is_told_beside_what_holds(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    _write(path, "tenants: {acme: {weight: 2}}\n")
    policies = Policies(path)
    _write(path, "tenants: {acme: {wieght: 2}}\n")
    await policies.reload()
    report = await policy_report(policies)
    assert "wieght" in report["problem"]
    assert report["effective"]["tenants"]["acme"]["weight"] == 2
    assert len(report["history"]) == 1


def _write(path: Path, text: str) -> None:
    path.write_text(text)

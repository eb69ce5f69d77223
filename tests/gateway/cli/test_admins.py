import json
from pathlib import Path

import pytest

from gateway.admin.admins import AdminKeys, AdminStore, Role
from gateway.tenants.key_store import KeyStore
from tests.gateway.cli.conftest import Printed, Sluice


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_an_admin_is_made_listed_and_revoked_on_record(state: Path, printed: Printed) -> None:
    key = printed("admins", "create", "Ada L.", "--role", "operator").strip()
    keys = AdminKeys("correct-horse-battery", AdminStore(KeyStore(state)))
    assert keys.admin(f"Bearer {key}".encode()).role is Role.OPERATOR
    listed = printed("admins", "list")
    assert "Ada L." in listed and "operator" in listed and key not in listed
    printed("admins", "revoke", "Ada L.")
    assert "Ada L." not in printed("admins", "list")
    entries = [json.loads(line) for line in (state / "audit.log").read_text().splitlines()]
    assert [entry["action"] for entry in entries] == ["admins.create", "admins.revoke"]
    assert key not in (state / "audit.log").read_text()


@pytest.mark.parametrize("name", ["", " ada", "a" * 65, "a\nb"])
def test_a_name_is_printable(name: str, sluice: Sluice) -> None:
    status, _, problem = sluice("admins", "create", name)
    assert status == 2
    assert "a name has 1 to 64 printable characters" in problem


def test_an_unknown_admin_cannot_be_revoked(sluice: Sluice) -> None:
    status, _, problem = sluice("admins", "revoke", "bob")
    assert status == 1
    assert "there is no admin bob: `sluice admins list` shows all" in problem

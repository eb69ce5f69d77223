import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.errors import InvalidApiKey
from gateway.tenants.auth import KeyRing, Principal
from gateway.tenants.key_store import KeyStore
from quotas.policy.policy_file import read_policy
from tests.gateway.cli.conftest import Printed, Sluice

PEPPER = "a-pepper-of-more-than-32-bytes-for-tests"
KEY = re.compile(r"sk-sluice-([0-9a-f]{8})-[0-9a-f]{40}")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KeyStore:
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("SLUICE_PEPPER", raising=False)
    return KeyStore(tmp_path / "state")


@pytest.fixture
def made(printed: Printed) -> Printed:
    return lambda *arguments: printed("keys", *arguments).strip()


def id_of(key: str) -> str:
    return KEY.fullmatch(key)[1]  # type: ignore[index]


def opened(store: KeyStore, key: str, after: timedelta = timedelta()) -> Principal | None:
    """On whose behalf, in a gateway that reads the store."""
    ring = KeyRing(store.pepper(), store.records(), (datetime.now(UTC) + after).timestamp)
    try:
        return ring.authenticate(f"Bearer {key}".encode())
    except InvalidApiKey:
        return None


def test_a_key_opens_for_its_tenant_with_its_scopes_until_it_expires(store: KeyStore, made: Printed) -> None:
    key = made("create", "acme", "--scopes", "limits", "--expires-days", "7", "--name", "Ann's laptop")
    assert opened(store, key) == Principal("acme", id_of(key), ("limits",))
    assert opened(store, key, timedelta(days=6, hours=23)) is not None
    assert opened(store, key, timedelta(days=7)) is None
    listed = made("list")
    assert key not in listed
    assert listed.splitlines()[1].split(maxsplit=7)[-2:] == ["limits", "Ann's laptop"]


def test_a_key_may_expire_on_a_date(store: KeyStore, made: Printed) -> None:
    key = made("create", "acme", "--expires", "2131-01-31")
    (record,) = store.records()
    assert record.expires == datetime(2131, 1, 31, tzinfo=UTC)
    assert opened(store, key) == Principal("acme", id_of(key), ("inference", "limits"))


def test_keys_of_one_tenant_may_be_listed_alone(made: Printed) -> None:
    keys = {tenant: made("create", tenant) for tenant in ("acme", "beta")}
    assert id_of(keys["acme"]) not in made("list", "--tenant", "beta")
    assert id_of(keys["beta"]) in made("list", "--tenant", "beta")


def test_a_revoked_key_opens_nothing_and_cannot_be_revoked_again(
    store: KeyStore, made: Printed, sluice: Sluice
) -> None:
    key = made("create", "acme")
    made("rotate", id_of(key))
    made("revoke", id_of(key))
    assert opened(store, key) is None
    done = sluice("keys", "revoke", id_of(key))
    assert (done.status, f"there is no stored key '{id_of(key)}'" in done.err) == (1, True)


def test_a_rotated_key_keeps_its_id_and_what_it_may_do(store: KeyStore, made: Printed) -> None:
    old = made("create", "acme", "--scopes", "inference", "--name", "batch")
    new = made("rotate", id_of(old))
    assert new != old
    assert opened(store, new) == opened(store, old) == Principal("acme", id_of(old), ("inference",))
    assert [record.name for record in store.records()] == ["batch"]


def test_the_old_secret_ends_with_the_overlap_and_the_new_one_does_not(store: KeyStore, made: Printed) -> None:
    old = made("create", "acme")
    new = made("rotate", id_of(old), "--overlap", "1h")
    assert "old secret until" in made("list")
    assert opened(store, old, timedelta(minutes=59)) is not None
    assert opened(store, old, timedelta(hours=1)) is None
    assert opened(store, new, timedelta(days=9999)) is not None


def test_an_overlap_does_not_lengthen_the_life_of_the_old_secret(store: KeyStore, made: Printed) -> None:
    old = made("create", "acme", "--expires-days", "1")
    new = made("rotate", id_of(old), "--overlap", "30d", "--expires-days", "60")
    assert opened(store, old, timedelta(days=1)) is None
    assert opened(store, new, timedelta(days=59)) is not None


def test_a_rotated_key_lives_as_long_as_it_did_unless_told_otherwise(store: KeyStore, made: Printed) -> None:
    old = made("create", "acme", "--expires-days", "30")
    new = made("rotate", id_of(old), "--overlap", "0s")
    (record,) = store.records()
    assert record.expires is not None
    assert record.expires - record.created == pytest.approx(timedelta(days=30), abs=timedelta(seconds=1))
    assert opened(store, old) is None
    assert opened(store, new) is not None


def test_a_second_rotation_does_not_cut_short_what_the_first_promised(
    store: KeyStore, made: Printed, sluice: Sluice
) -> None:
    first = made("create", "acme")
    second = made("rotate", id_of(first))
    done = sluice("keys", "rotate", id_of(first))
    assert (done.status, "--overlap 0s" in done.err) == (1, True)
    assert opened(store, first) == opened(store, second)
    third = made("rotate", id_of(first), "--overlap", "0s")
    assert [opened(store, key) is not None for key in (first, second, third)] == [False, False, True]


def test_a_key_that_is_not_stored_cannot_be_rotated(store: KeyStore, sluice: Sluice) -> None:
    done = sluice("keys", "rotate", f"\x1b[2Jsk-sluice-{'7' * 40}")
    assert (done.status, "\x1b" in done.err, "7777" in done.err) == (1, False, False)
    assert store.records() == []


def test_lines_for_a_policy_file_let_in_a_key_that_is_stored_nowhere(
    store: KeyStore, tmp_path: Path, sluice: Sluice
) -> None:
    done = sluice("keys", "create", "acme", "--print-policy", "--scopes", "limits", "--expires", "2131-01-31")
    assert done.status == 0
    (tmp_path / "acme.yaml").write_text(done.out)
    key = done.err.splitlines()[0]
    (entry,) = read_policy(tmp_path / "acme.yaml").tenant("acme").keys.values()
    assert (entry.id, entry.scopes, entry.expires) == (id_of(key), ("limits",), datetime(2131, 1, 31, tzinfo=UTC))
    assert entry.hmac is not None
    assert key not in done.out
    assert store.records() == []


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("tenants: {acme: }", 'does not name acmee (key {id}): nothing limits it; did you mean "acme"?'),
        ("tenants: {globex: }\ndefaults: {limits: {requests: 5/s}}", "acmee (key {id}): the defaults hold for it"),
        ("tenants: {acme: }\nunnamed_tenants: refuse", "its keys are refused (unnamed_tenants: refuse); did you"),
        ("tenants: {acme: {wieght: 2}}", "whether the policy names acmee cannot be told"),
    ],
)
def test_a_tenant_that_the_policy_does_not_name_is_a_warning(
    policy: str, said: str, tmp_path: Path, sluice: Sluice
) -> None:
    (tmp_path / "policy.yaml").write_text(policy)
    done = sluice("keys", "create", "acmee", "--policy", tmp_path / "policy.yaml")
    assert done.status == 0
    assert said.format(id=id_of(done.out.strip())) in done.err


def test_a_tenant_that_the_policy_names_is_none(tmp_path: Path, sluice: Sluice) -> None:
    (tmp_path / "policy.yaml").write_text("tenants: {acme: }")
    done = sluice("keys", "create", "acme", "--policy", tmp_path / "policy.yaml")
    assert (done.status, "acme" in done.err) == (0, False)


def test_without_a_policy_a_name_near_another_tenants_is_a_warning(sluice: Sluice) -> None:
    for tenant, said in (("acme", False), ("acmee", True), ("globex", False), ("acme", False)):
        done = sluice("keys", "create", tenant)
        assert (done.status, 'acmee has no other key; did you mean "acme"?' in done.err) == (0, said)


def test_the_shared_pepper_is_used_where_one_is_set(
    store: KeyStore, made: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_PEPPER", PEPPER)
    key = made("create", "acme")
    assert not (store.directory / "pepper").exists()
    ring = KeyRing(PEPPER.encode(), store.records())
    assert ring.authenticate(f"Bearer {key}".encode()).tenant == "acme"


def test_a_foreign_file_cannot_steer_the_terminal(store: KeyStore, made: Printed, sluice: Sluice) -> None:
    made("create", "acme")
    version, text = store.path.read_text().splitlines()
    entry = json.loads(text) | {"name": "\x1b]0;x\x07\u202eevil\nsk-sluice-"}
    store.path.write_text(f"{version}\n{json.dumps(entry)}\n")
    listed = made("list")
    assert len(listed.splitlines()) == 2
    store.path.write_text(
        f"{version}\n{json.dumps(entry | {'tenant': 'a' + chr(13) + chr(27) + ']0;x' + chr(7) + 'b'})}\n"
    )
    refused = sluice("keys", "list")
    assert refused.status == 1 and "is no name of a tenant" in refused.err
    assert all(character.isprintable() or character == "\n" for character in listed + refused.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["create", "=cmd"],
        ["create", "a" * 65],
        ["create", "acme", "--expires-days", "0"],
        ["create", "acme", "--expires-days", "9" * 5000],
        ["create", "acme", "--expires", "2011-01-31"],
        ["create", "acme", "--expires", "2131-01-31T12:00"],
        ["create", "acme", "--expires", "2131-01-31", "--expires-days", "3"],
        ["create", "acme", "--scopes", "admin"],
        ["create", "acme", "--scopes", ""],
        ["create", "acme", "--name", "a\x1b[31m"],
        ["create", "acme", "--name", ""],
        ["create", "acme", "--name", "n" * 65],
        ["create", f"sk-sluice-{'7' * 40}"],
        ["create", "acme", "--name", f"of sk-sluice-{'7' * 40}"],
        ["rotate", "abc", "--overlap", "1"],
        ["rotate", "abc", "--overlap", "-1h"],
        ["rotate"],
        ["list", "--tenant", "a b"],
    ],
)
def test_a_wrong_flag_makes_no_key(arguments: list[str], store: KeyStore, sluice: Sluice) -> None:
    done = sluice("keys", *arguments)
    assert (done.status, "\x1b" in done.err, "7777" in done.err) == (2, False, False)
    assert store.records() == []


def test_the_command_puts_the_key_and_nothing_else_on_standard_output() -> None:
    command = [sys.executable, "-m", "gateway.cli.main", "keys", "create", "acme"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert KEY.fullmatch(done.stdout.strip())
    assert done.stderr.startswith("Shown this once.")


def recorded(store: KeyStore) -> list[tuple[str, str, str]]:
    entries = map(json.loads, (store.directory / "audit.log").read_text().splitlines())
    return [(entry["action"], entry["target"], entry["result"]) for entry in entries]


def test_changes_of_keys_are_in_the_audit_log_without_a_gateway(store: KeyStore, sluice: Sluice) -> None:
    made = sluice("keys", "create", "acme")
    (record,) = store.records()
    told = [made, *(sluice("keys", command, record.id) for command in ("rotate", "rotate", "revoke", "revoke"))]
    assert [done.status for done in told] == [0, 0, 1, 0, 1]
    target = f"{record.id} of acme"
    actions = ("keys.create", "keys.rotate", "keys.rotate", "keys.rotate", "keys.revoke")
    assert [(action, whose) for action, whose, _ in recorded(store)] == [(action, target) for action in actions]
    assert [result[:7] for _, _, result in recorded(store)] == ["begun", "begun", "begun", "failed:", "begun"]
    text = (store.directory / "audit.log").read_text()
    assert all(key.rpartition("-")[2] not in text for done in told[:2] for key in done.out.split())
    assert all(json.loads(line)["actor"].startswith("command line of ") for line in text.splitlines())


def test_a_change_that_cannot_be_recorded_is_not_done(store: KeyStore, sluice: Sluice) -> None:
    (store.directory / "audit.log").mkdir(parents=True)
    store.directory.chmod(0o700)
    done = sluice("keys", "create", "acme")
    assert (done.status, store.records()) == (1, [])
    assert "nothing was changed" in done.err


def test_a_key_is_made_for_each_name_with_settings_in_a_policys_words(store: KeyStore, made: Printed) -> None:
    settings = "{limits: {requests: 60/min}, classes: [batch], tags: {project: search}}"
    keys = made("create", "acme", "--name", "a", "--name", "b", "--settings", settings).split()
    assert [record.name for record in store.records()] == ["a", "b"]
    assert all(opened(store, key) is not None for key in keys)
    assert made("edit", id_of(keys[0]), "--name", "c", "--settings", "{models: [m]}", "--expires", "2131-01-31") == ""
    edited, other = store.records()
    assert (edited.name, json.loads(edited.settings), edited.expires) == (
        "c",
        {"models": ["m"]},
        datetime(2131, 1, 31, tzinfo=UTC),
    )
    assert (other.name, other.tags, opened(store, keys[0]) is not None) == ("b", {"project": "search"}, True)
    made("edit", id_of(keys[0]), "--settings", "")
    assert store.records()[0].settings == ""


@pytest.mark.parametrize("settings", ["{limits: {requests: x}}", "{hmac: ab}", "{limits: {cost: 5/day}}"])
def test_settings_that_cannot_be_are_refused_by_their_field(store: KeyStore, sluice: Sluice, settings: str) -> None:
    done = sluice("keys", "create", "acme", "--settings", settings)
    assert (done.status, "--settings: " in done.err, store.records()) == (2, True, [])
    assert sluice("keys", "edit", "nobody", "--name", "x").status == 1

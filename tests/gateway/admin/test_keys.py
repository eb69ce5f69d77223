import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.audit_log import AuditLog
from gateway.admin.keys import KeyEdit, Keys, NewKey, Rotation
from gateway.errors import (
    AuditUnavailable,
    BadRequest,
    InvalidApiKey,
    KeyChanged,
    KeyNotFound,
    KeysUnavailable,
    TenantNotNamed,
)
from gateway.settings.settings import Settings
from gateway.tenants.auth import Principal, new_key
from gateway.tenants.effective_policy import EffectivePolicy
from gateway.tenants.key_source import KeySource
from gateway.tenants.live_policy import LivePolicy

POLICY = """
tenants:
  acme: {limits: {requests: 5/min}, keys: {inpolicy: {hmac: "%s"}}}
  globex: {}
""" % ("ab" * 32)


class Site:
    def __init__(self, directory: Path, policy: str | None = POLICY) -> None:
        path = directory / "policy.yaml"
        path.write_text(policy or "")
        self.state = directory / "state"
        self.policies = LivePolicy(path if policy else None)
        settings = Settings(state_dir=self.state, demo_key=None, pepper=None)
        self.source = KeySource(settings, self.policies.current)
        self.audit = AuditLog(self.state / "audit.log")
        self.keys = Keys(self.source, self.policies, self.audit)

    def opens(self, key: str) -> Principal | None:
        try:
            return self.source.ring.authenticate(f"Bearer {key}".encode())
        except InvalidApiKey:
            return None

    async def row(self, key_id: str) -> dict[str, Any]:
        rows = (await self.keys.listed(""))["keys"]
        return next(row for row in rows if row["id"] == key_id)

    async def record(self) -> list[tuple[str, str, str, str]]:
        """Oldest first."""
        entries = await self.audit.entries()
        return [(e["actor"], e["action"], e["target"], e["result"]) for e in reversed(entries)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_a_key_lives_through_making_rotating_and_revoking_each_in_force_at_once(site: Site) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme", name="app", scopes=["limits"], expires_days=7))
    assert site.opens(made["key"]) == Principal("acme", made["id"], ("limits",))
    assert made["expires"] == pytest.approx((datetime.now(UTC) + timedelta(days=7)).timestamp(), abs=60)
    turned = await site.keys.rotate("me", made["id"], Rotation(overlap="1h"))
    assert turned["id"] == made["id"]
    assert site.opens(made["key"]) == site.opens(turned["key"]) == Principal("acme", made["id"], ("limits",))
    ended = await site.keys.rotate("me", made["id"], Rotation(overlap="0s"))
    assert (site.opens(made["key"]), site.opens(turned["key"])) == (None, None)
    assert await site.keys.revoke("me", made["id"]) == {"revoked": True}
    assert site.opens(ended["key"]) is None
    target = f"{made['id']} of acme"
    actions = ("keys.create", "keys.rotate", "keys.rotate", "keys.revoke")
    assert await site.record() == [("me", action, target, "begun") for action in actions]


async def test_a_tenant_that_the_policy_does_not_name_is_asked_about_with_the_name_that_may_be_meant(
    site: Site,
) -> None:
    with pytest.raises(TenantNotNamed, match=r"does not name the tenant 'acmee'.*did you mean \"acme\"") as refused:
        await site.keys.create("me", NewKey(tenant="acmee"))
    assert refused.value.param == "tenant"
    assert await site.record() == []
    made = await site.keys.create("me", NewKey(tenant="acmee", unnamed=True))
    assert site.opens(made["key"]) is not None
    assert (await site.row(made["id"]))["named"] is False


async def test_where_no_tenant_is_named_every_name_is_as_good(tmp_path: Path) -> None:
    site = Site(tmp_path, policy=None)
    made = await site.keys.create("me", NewKey(tenant="anybody"))
    assert (await site.row(made["id"]))["named"] is True


async def test_a_key_has_two_secrets_at_most(site: Site) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme"))
    await site.keys.rotate("me", made["id"], Rotation())
    with pytest.raises(BadRequest, match=r"rotated already.*an overlap of 0s"):
        await site.keys.rotate("me", made["id"], Rotation())
    assert (await site.record())[-1][3].startswith("failed: ")


@pytest.mark.parametrize("key_id", ["nobody", "", "../keys", "inpolicy", "demo"])
async def test_a_key_that_is_not_stored_is_neither_rotated_nor_revoked(site: Site, key_id: str) -> None:
    for change in (site.keys.rotate("me", key_id, Rotation()), site.keys.revoke("me", key_id)):
        with pytest.raises(KeyNotFound):
            await change
    assert await site.record() == []


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tenant", {"tenant": "no tenant\n"}),
        ("tenant", {"tenant": ""}),
        ("name", {"tenant": "acme", "name": "x" * 65}),
        ("name", {"tenant": "acme", "name": "a\u202eb"}),
        ("tenant", {"tenant": "sk-sluice-77777777", "unnamed": True}),
        ("name", {"tenant": "acme", "name": "of sk-sluice-77777777"}),
        ("scopes", {"tenant": "acme", "scopes": ["admin"]}),
    ],
)
async def test_bad_input_is_told_by_its_field_and_makes_nothing(site: Site, field: str, body: dict[str, Any]) -> None:
    before = len(site.source.in_force)
    with pytest.raises(BadRequest) as refused:
        await site.keys.create("me", NewKey(**body))
    assert (refused.value.param, "7777" in refused.value.message) == (field, False)
    assert (len(site.source.in_force), await site.record()) == (before, [])


async def test_an_action_that_cannot_be_recorded_is_not_done(site: Site) -> None:
    (site.state / "audit.log").mkdir()
    with pytest.raises(AuditUnavailable):
        await site.keys.create("me", NewKey(tenant="acme"))
    assert not site.source.store.path.exists()


async def test_a_damaged_key_file_is_said_to_be_damaged_and_the_failure_is_on_record(site: Site) -> None:
    site.source.store.path.write_text("{")
    with pytest.raises(KeysUnavailable, match="is damaged"):
        await site.keys.create("me", NewKey(tenant="acme"))
    assert [result[:7] for *_, result in await site.record()] == ["begun", "failed:"]


async def test_keys_are_found_by_words_and_told_where_they_come_from(site: Site) -> None:
    made = await site.keys.create("me", NewKey(tenant="globex", name="Nightly"))
    assert [row["id"] for row in (await site.keys.listed("NIGHT"))["keys"]] == [made["id"]]
    assert (await site.row("inpolicy"))["origin"] == "policy"
    assert (await site.row("demo"))["origin"] == "demo"
    assert (await site.keys.listed("no such"))["keys"] == []
    assert (await site.keys.listed(""))["tenants"] == ["acme", "demo", "globex"]


async def test_of_many_keys_a_thousand_are_told_and_the_others_counted(site: Site) -> None:
    pepper = site.source.pepper
    with site.source.store.edit() as records:
        for _ in range(1003):
            _, record = new_key("acme", pepper)
            records[record.id] = record
    await site.source.reload()
    listed = await site.keys.listed("acme")
    assert (len(listed["keys"]), listed["truncated"]) == (1000, len(site.source.in_force) - 1001)


SETTINGS = {"limits": {"requests": "2/min"}, "classes": ["batch"], "tags": {"project": "search"}}


async def test_a_key_is_edited_without_another_secret_and_the_audit_log_tells_what_changed(site: Site) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme", name="app", settings="{tags: {project: old}}"))
    assert made["settings"] == {"tags": {"project": "old"}}
    edit = KeyEdit(name="other", expires="2099-01-31", settings=SETTINGS)
    dry = await site.keys.edit("me", made["id"], edit.model_copy(update={"dry_run": True}))
    assert (await site.row(made["id"]))["name"] == "app"
    done = await site.keys.edit("me", made["id"], edit)
    assert done == dry
    assert [line.partition(":")[0] for line in done["changes"]] == ["name", "expires", "settings"]
    principal = site.opens(made["key"])
    assert principal is not None
    assert EffectivePolicy(site.policies.current, principal).service_class(None).name == "batch"
    assert (await site.row(made["id"]))["settings"] == SETTINGS
    cleared = await site.keys.edit("me", made["id"], KeyEdit(expires="never", settings=""))
    assert (cleared["expires"], cleared["settings"], cleared["name"]) == (None, {}, "other")
    assert (await site.keys.edit("me", made["id"], KeyEdit(name="other")))["changes"] == []
    edits = [target for _, action, target, _ in await site.record() if action == "keys.edit"]
    assert len(edits) == 2, "neither a dry run nor an edit that changes nothing is on record"
    assert "name: app -> other" in edits[0]
    rotated = await site.keys.rotate("me", made["id"], Rotation(overlap="0s"))
    assert (await site.row(rotated["id"]))["name"] == "other"


async def test_an_edit_of_a_key_that_was_edited_since_is_refused(site: Site) -> None:
    """Two admins, or two tabs of one."""
    made = await site.keys.create("me", NewKey(tenant="acme", name="app"))
    fields = [("settings", SETTINGS), ("name", "x"), ("scopes", []), ("expires", "2099-01-31"), ("expires", "never")]
    for field, value in fields:
        edition = (await site.row(made["id"]))["edition"]
        await site.keys.edit("me", made["id"], KeyEdit(**{field: value}))
        with pytest.raises(KeyChanged, match="was edited since"):
            await site.keys.edit("you", made["id"], KeyEdit(name="y", edition=edition))
    assert (await site.row(made["id"]))["name"] == "x"
    edition = (await site.row(made["id"]))["edition"]
    await site.keys.rotate("me", made["id"], Rotation())
    assert (await site.keys.edit("you", made["id"], KeyEdit(name="y", edition=edition)))["name"] == "y"


async def test_of_two_edits_of_one_edition_at_once_one_is_refused(site: Site) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme", name="app"))
    edits = [KeyEdit(name=name, edition=made["edition"]) for name in ("x", "y")]
    done = await asyncio.gather(*(site.keys.edit("me", made["id"], one) for one in edits), return_exceptions=True)
    assert sorted(type(one).__name__ for one in done) == ["KeyChanged", "dict"]
    (name,) = [one["name"] for one in done if isinstance(one, dict)]
    assert (await site.row(made["id"]))["name"] == name


@pytest.mark.parametrize("expires", ["", "expires: 2098-01-31"])
async def test_an_edit_is_refused_after_one_of_another_replica_that_was_not_read_yet(
    site: Site, tmp_path: Path, expires: str
) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme", name="app"))
    policy = f"tenants: {{acme: {{keys: {{{made['id']}: {{{expires}}}}}}}}}"
    one, other = (Site(tmp_path, policy) for _ in range(2))
    edition = (await one.row(made["id"]))["edition"]
    await one.keys.edit("me", made["id"], KeyEdit(name="x", edition=edition))
    with pytest.raises(KeyChanged, match=f"The key '{made['id']}' was edited since you read it"):
        await other.keys.edit("you", made["id"], KeyEdit(name="y", edition=edition))
    row = await other.row(made["id"])
    assert row["name"] == "x", "read again at once"
    assert (await other.record())[-1][-1].startswith("failed: the key")
    assert (await other.keys.edit("you", made["id"], KeyEdit(name="y", edition=row["edition"])))["name"] == "y"


async def test_the_audit_log_has_no_address_of_an_alert_but_its_host(site: Site) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme"))
    for secret in ("T0ps3cret", "An0ther"):
        alert = {"at": "50%", "url": f"https://hooks.example.com/{secret}"}
        tokens = {"budget": "1k/day", "alerts": [alert]}
        settings = {"limits": {"tokens": tokens}, "tags": {"url": "x://y"}}
        edited = await site.keys.edit("me", made["id"], KeyEdit(settings=settings))
        assert edited["settings"]["limits"]["tokens"]["alerts"] == [alert]
        assert len(edited["changes"]) == 1, "another path is a change"
    told = str(await site.record()) + str(edited["changes"])
    assert "hooks.example.com" in told and "T0ps3cret" not in told and "An0ther" not in told


@pytest.mark.parametrize(
    ("field", "edit"),
    [
        ("settings", {"settings": {"limits": {"tokens": "many"}}}),
        ("settings", {"settings": {"classes": ["nope"]}}),
        ("settings", {"settings": {"hmac": "ab" * 32}}),
        ("settings", {"settings": "a: [b"}),
        ("settings", {"settings": {"limits": {"cost": "1/day"}}}),  # the tenant has no price
        ("expires", {"expires": "soon"}),
        ("scopes", {"scopes": ["admin"]}),
    ],
)
async def test_an_edit_that_cannot_be_is_told_by_its_field_and_changes_nothing(
    site: Site, field: str, edit: dict[str, Any]
) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme"))
    with pytest.raises(BadRequest) as refused:
        await site.keys.edit("me", made["id"], KeyEdit(**edit))
    assert refused.value.param == field
    for key_id in ("nobody", "inpolicy"):
        with pytest.raises(KeyNotFound):
            await site.keys.edit("me", key_id, KeyEdit(name="x"))


async def test_a_key_whose_settings_a_later_policy_does_not_allow_is_listed_with_the_reason(site: Site) -> None:
    made = await site.keys.create("me", NewKey(tenant="acme", settings={"models": ["m"]}))
    assert made["problem"] is None
    (site.state.parent / "policy.yaml").write_text("tenants: {acme: {models: [other]}}")
    await site.policies.reload()
    assert "is not among its tenant's models" in (await site.row(made["id"]))["problem"]
    fixed = await site.keys.edit("me", made["id"], KeyEdit(settings=""))
    assert fixed["problem"] is None

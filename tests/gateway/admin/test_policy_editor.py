"""Edits of policy files from the admin port: what is written, what is refused, and what is undone."""

import asyncio
import json
import os
import subprocess
from errno import EBUSY
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.admin.audit_log import AuditLog
from gateway.admin.policy_editor import PolicyEditor, SourceEdit
from gateway.errors import BadRequest, PolicyChanged, PolicyUnavailable
from gateway.tenants.live_policy import LivePolicy

POLICY = """\
# Our tenants, by contract.
defaults: {weight: 1}  # of everybody else
tenants:
  acme:  # pays most
    weight: 3
    limits: {tokens: 100k/min}   # asked for more in May

  # a trial
  globex: {weight: 2}
prefix_sharing: {friends: [acme, globex]}
"""
ACME = POLICY[POLICY.index("  acme") : POLICY.index("  globex")]


class Site:
    def __init__(self, folder: Path, mode: Any = "auto", text: str = POLICY) -> None:
        self.file = folder / "policy.yaml"
        self.file.write_text(text)
        self.file.chmod(0o640)
        self.policies = LivePolicy(self.file)
        self.log = folder / "audit.log"
        self.editor = PolicyEditor(self.policies, AuditLog(self.log), mode, lambda: 5.0)

    async def edit(self, tenant: str | None, text: str, **changes: Any) -> dict[str, Any]:
        source = await self.editor.source(tenant)
        asked = {"file": source["file"], "digest": source["digest"], "tenant": tenant, "text": text} | changes
        return await self.editor.edit("ada", SourceEdit(**asked))

    @property
    def weights(self) -> dict[str, float]:
        return {name: tenant.weight for name, tenant in self.policies.current.tenants.items()}

    def audited(self) -> list[tuple[str, str, str]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(one["actor"], one["target"], one["result"]) for one in map(json.loads, lines)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_an_edit_of_one_tenant_leaves_every_other_byte_of_the_file(site: Site) -> None:
    source = await site.editor.source("acme")
    assert (source["text"], source["first_line"], source["obstacle"]) == (ACME, 4, None)
    done = await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    assert (done["written"], done["changes"]) == (True, ["tenant acme", "  weight: 3 -> 4"])
    assert site.file.read_text() == POLICY.replace("weight: 3", "weight: 4")
    assert site.file.stat().st_mode & 0o777 == 0o640
    assert site.weights == {"acme": 4, "globex": 2}
    assert site.audited() == [("ada", f"acme in {site.file}", "tenant acme;   weight: 3 -> 4")]
    assert [*site.file.parent.glob(".policy*")] == []


async def test_a_tenant_is_added_behind_the_last_one_and_removed_by_an_empty_text(site: Site) -> None:
    await site.edit("initech", "  initech: {weight: 5}")
    assert site.file.read_text() == POLICY.replace("{weight: 2}\n", "{weight: 2}\n  initech: {weight: 5}\n")
    removed = await site.edit("initech", "")
    assert site.file.read_text() == POLICY
    await site.editor.undo("ada", removed["edit"])
    assert site.weights["initech"] == 5


async def test_an_edit_is_undone_while_its_lines_are_as_it_left_them(site: Site) -> None:
    first = await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    await site.edit("globex", "  globex: {weight: 9}\n")
    undone = await site.editor.undo("bob", first["edit"])
    assert (undone["written"], undone["changes"]) == (True, ["tenant acme", "  weight: 4 -> 3"])
    assert site.weights == {"acme": 3, "globex": 9}
    assert [one["actor"] for one in site.editor.made()] == ["bob", "ada", "ada"]
    with pytest.raises(PolicyChanged, match=r"lines of edit 1 in .* have changed since"):
        await site.editor.undo("bob", first["edit"])
    with pytest.raises(BadRequest, match="Edit 99 is not among the last 20"):
        await site.editor.undo("bob", 99)


@pytest.mark.parametrize(
    ("by_hand", "instead"),
    [
        ("  new: {weight: 1}\n", "  new: {weight: 1}\n    # a note\n    max_n: 3\n"),
        ("  new: {weight: 1}\n", "#  new: {weight: 1}\n"),
    ],
)
async def test_an_undo_hands_no_line_to_another_tenant(site: Site, by_hand: str, instead: str) -> None:
    done = await site.edit("new", "  new: {weight: 1}\n")
    site.file.write_text(site.file.read_text().replace(by_hand, instead))
    with pytest.raises(PolicyChanged, match="lines of edit 1"):
        await site.editor.undo("bob", done["edit"])


@pytest.mark.parametrize("name", ["acme", "'acme'", '"acme"', "acme "])
async def test_a_tenant_is_found_however_its_name_is_written_and_lines_end_as_in_the_file(
    tmp_path: Path, name: str
) -> None:
    site = Site(tmp_path)
    text = f"tenants:\r\n  {name}:\r\n    weight: 1\r\n  globex: {{weight: 2}}\r\n"
    site.file.write_bytes(text.encode())
    await site.policies.reload()
    done = await site.edit("acme", f"  {name}:\n    weight: 4")
    assert (done["written"], site.weights) == (True, {"acme": 4, "globex": 2})
    assert site.file.read_bytes() == text.replace("weight: 1", "weight: 4").encode()
    await site.editor.undo("bob", done["edit"])
    assert site.file.read_bytes() == text.encode()


async def test_the_audit_log_has_no_hash_of_a_key_and_says_what_it_leaves_out(site: Site) -> None:
    await site.edit("acme", ACME + f"    keys: {{k1: {{hmac: {'ab' * 32}}}}}\n")
    await site.edit("many", "".join(f"  many{number}: {{weight: 2}}\n" for number in range(100)))
    assert "abab" not in site.log.read_text()
    assert site.audited()[-1][2].endswith("… (of 200 lines)")


async def test_a_file_that_is_not_utf8_is_told(site: Site) -> None:
    site.file.write_bytes(POLICY.encode() + b"# \xff\n")
    with pytest.raises(PolicyUnavailable, match="is not UTF-8"):
        await site.editor.source(None)


async def test_what_is_not_valid_is_told_by_line_and_not_written(site: Site) -> None:
    done = await site.edit("acme", "  acme: {wieght: 3}\n")
    assert (done["valid"], done["problems"][0]["line"], done["problems"][0]["path"]) == (False, 4, "tenants.acme")
    assert (site.file.read_text(), site.audited()) == (POLICY, [])


async def test_a_dry_run_tells_the_changes_and_writes_nothing(site: Site) -> None:
    done = await site.edit(None, POLICY.replace("weight: 3", "weight: 4"), dry_run=True)
    assert (done["written"], done["changes"]) == (False, ["tenant acme", "  weight: 3 -> 4"])
    assert (site.file.read_text(), site.weights["acme"]) == (POLICY, 3)


async def test_a_file_that_has_changed_since_it_was_read_is_not_overwritten(site: Site) -> None:
    source = await site.editor.source("acme")
    site.file.write_text(POLICY + "# by hand\n")
    with pytest.raises(PolicyChanged, match="has changed since it was read"):
        await site.edit("acme", ACME, digest=source["digest"])
    with pytest.raises(BadRequest, match="is no file of the policy"):
        await site.edit("acme", ACME, file="/etc/passwd")


async def test_an_edit_by_hand_between_the_check_and_the_write_is_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_hand(descriptor: int) -> None:
        site.file.write_text(POLICY + "# by hand\n")

    monkeypatch.setattr("gateway.admin.policy_editor.os.fsync", by_hand)
    with pytest.raises(PolicyChanged, match="has changed meanwhile"):
        await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    monkeypatch.undo()
    assert site.file.read_text() == POLICY + "# by hand\n"
    assert [*site.file.parent.glob(".policy*")] == []


async def test_a_file_that_the_system_does_not_let_go_gets_a_patch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(EBUSY, os.strerror(EBUSY))))  # mounted by itself
    done = await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    assert (done["written"], done["obstacle"]) == (False, f"{site.file} cannot be replaced: Device or resource busy")
    assert "+    weight: 4" in done["patch"]
    assert site.audited()[-1][2] == "failed: Device or resource busy"
    assert (site.file.read_text(), [*site.file.parent.glob(".policy*")]) == (POLICY, [])


async def test_a_gateway_that_may_not_give_files_away_keeps_their_group(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = list[int]()

    def chown(path: Path, user: int, group: int) -> None:
        if user != -1:
            raise PermissionError
        groups.append(group)

    monkeypatch.setattr(os, "chown", chown)
    await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    assert groups == [site.file.stat().st_gid]


async def test_an_edit_is_on_the_disk_with_its_name_before_it_is_answered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    monkeypatch.setattr(
        "gateway.admin.policy_editor.os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino)
    )
    await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    assert synced[-2:] == [site.file.stat().st_ino, site.file.parent.stat().st_ino]


@pytest.mark.parametrize("mode", ["auto", "off", "on"])
async def test_a_git_checkout_gets_a_patch_that_applies(tmp_path: Path, mode: str) -> None:
    apply = partial(subprocess.run, ["git", "apply", "-p0"], check=True, cwd=tmp_path)
    (tmp_path / ".git").mkdir()
    site = Site(tmp_path, mode, POLICY.rstrip("\n"))
    done = await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    assert done["written"] is (mode == "on")
    if mode != "on":
        assert ("Git checkout" in done["obstacle"]) is (mode == "auto")
        assert site.weights["acme"] == 3
        await asyncio.to_thread(apply, input=done["patch"].encode())
        await site.policies.reload()
    assert site.weights["acme"] == 4


@pytest.mark.parametrize("obstacle", ["link", "read-only"])
async def test_what_comes_from_elsewhere_is_not_written(site: Site, obstacle: str) -> None:
    if obstacle == "link":
        real = site.file.with_suffix(".real")
        site.file.rename(real)
        site.file.symlink_to(real)
    elif os.geteuid() == 0:
        pytest.skip("root may write everything")
    else:
        site.file.chmod(0o440)
    done = await site.edit("acme", ACME.replace("weight: 3", "weight: 4"))
    assert not done["written"] and obstacle in done["obstacle"]
    assert done["patch"].startswith(f"--- {site.file}")


async def test_several_files_are_edited_by_tenant(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("tenants:\n  globex: {weight: 2}\n")
    site = Site(tmp_path, text="tenants:\n  acme: {weight: 3}\n")
    site.policies = LivePolicy(tmp_path)
    site.editor = PolicyEditor(site.policies, AuditLog(site.log), "auto")
    (problem,) = (await site.edit("acme", "  acme: {weight: 3}\n  globex: {weight: 9}\n"))["problems"]
    assert (problem["file"], problem["path"]) == (str(site.file), "tenants.globex")
    with pytest.raises(BadRequest, match="has 2 files: name a tenant"):
        await site.editor.source(None)
    await site.edit("globex", "  globex: {weight: 7}\n")
    assert site.weights == {"acme": 3, "globex": 7}
    assert (tmp_path / "b.yaml").read_text() == "tenants:\n  globex: {weight: 7}\n"


async def test_tenants_in_flow_style_are_edited_with_the_whole_file(tmp_path: Path) -> None:
    site = Site(tmp_path, text="tenants: {acme: {weight: 3}}\n")
    with pytest.raises(BadRequest, match="edit the whole file"):
        await site.editor.source("acme")
    await site.edit(None, "tenants: {acme: {weight: 4}}\n")
    assert site.weights == {"acme": 4}


async def test_a_prompt_that_reads_like_tenants_is_not_edited_as_one(tmp_path: Path) -> None:
    prompt = '["say\n\ntenants:\n  acme: x\n\nend"]'
    site = Site(tmp_path, text=f"defaults:\n  prefix_cache: {{pinned: {prompt}}}\ntenants:\n  globex:\n    weight: 1\n")
    with pytest.raises(BadRequest, match="edit the whole file"):
        await site.editor.source("acme")


async def test_the_built_in_policy_has_no_file(tmp_path: Path) -> None:
    editor = PolicyEditor(LivePolicy(None), AuditLog(tmp_path / "audit.log"), "auto")
    with pytest.raises(BadRequest, match="built-in policy"):
        await editor.source(None)

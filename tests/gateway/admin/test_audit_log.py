import asyncio
from pathlib import Path

import pytest

from gateway.admin.audit_log import TAIL_BYTES, AuditLog
from gateway.errors import AuditUnavailable
from gateway.tenants.auth import new_key
from tests.gateway.admin.clock import Clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def audit(path: Path) -> AuditLog:
    return AuditLog(path, Clock(1.8e9))


def content(path: Path) -> bytes:
    return path.read_bytes()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)


async def test_entries_come_back_newest_first_with_all_they_were_given(audit: AuditLog) -> None:
    await audit.record("key 1234", "drain", "gateway", "begun")
    await audit.record("key 1234", "request.cancel", "req_1 of acme", "cancelled")
    newest, oldest = await audit.entries()
    assert oldest == {"at": 1.8e9, "actor": "key 1234", "action": "drain", "target": "gateway", "result": "begun"}
    assert newest["action"] == "request.cancel"


async def test_the_file_is_private_and_only_ever_grows(audit: AuditLog, path: Path) -> None:
    await audit.record("a", "b", "c", "d")
    first = content(path)
    await audit.record("a", "b", "c", "e")
    assert mode(path) == 0o600
    assert content(path).startswith(first)


async def test_entries_of_earlier_runs_are_shown(audit: AuditLog, path: Path) -> None:
    await audit.record("a", "b", "c", "d")
    assert len(await AuditLog(path).entries()) == 1


async def test_before_the_first_change_there_are_none(audit: AuditLog) -> None:
    assert await audit.entries() == []


async def test_a_key_that_an_administrator_pasted_is_in_no_entry(audit: AuditLog, path: Path) -> None:
    key, _ = new_key("acme", b"pepper")
    for fields in (
        (key, "b", "c", "d"),
        ("a", "b", f"request {key}", "refused: No such request"),
        ("a", "b", "c", key),
    ):
        await audit.record(*fields)
    assert key.encode() not in content(path)
    assert [entry["target"] for entry in await audit.entries()] == ["c", "request ***", "c"]


async def test_one_entry_is_one_line_with_any_content(audit: AuditLog, path: Path) -> None:
    await audit.record("a", "b", 'x"\n{}\x00', "<script>")
    assert content(path).count(b"\n") == 1
    (entry,) = await audit.entries()
    assert (entry["target"], entry["result"]) == ('x"\n{}\x00', "<script>")


async def test_writers_side_by_side_do_not_mix_their_lines(path: Path) -> None:
    logs = [AuditLog(path), AuditLog(path)]
    await asyncio.gather(*(log.record("a", "b", "c" * 500, str(n)) for n in range(30) for log in logs))
    assert sorted(int(entry["result"]) for entry in await logs[0].entries()) == sorted([*range(30), *range(30)])


@pytest.mark.parametrize("damage", [b'{"half": \n[1]\n', b'{"at": 1800000000.0, "act'], ids=["damaged", "cut short"])
async def test_a_line_that_is_damaged_or_cut_short_hides_no_other(audit: AuditLog, path: Path, damage: bytes) -> None:
    await audit.record("a", "b", "c", "1")
    with path.open("ab") as file:
        file.write(damage)
    await audit.record("a", "b", "c", "2")
    assert [entry["result"] for entry in await audit.entries()] == ["2", "1"]


async def test_only_the_end_of_a_long_log_is_read(audit: AuditLog, path: Path) -> None:
    fill(path, b'{"result": "old"}\n' * (2 * TAIL_BYTES // 18))
    await audit.record("a", "b", "c", "new")
    entries = await audit.entries()
    assert entries[0]["result"] == "new" and len(entries) <= 1000


async def test_a_failed_write_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    audit = AuditLog(tmp_path / "file" / "audit.log")
    with pytest.raises(AuditUnavailable, match=r"file/audit\.log cannot be written \("):
        await audit.record("a", "b", "c", "d")


async def test_its_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    """It may be the first to make it: keys may be in the policy, and quotas in a store elsewhere."""
    audit = AuditLog(tmp_path / "state" / "audit.log")
    await audit.record("a", "drain", "c", "d")
    assert [entry["action"] for entry in await audit.entries()] == ["drain"]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700

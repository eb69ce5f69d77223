import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants import key_store
from gateway.tenants.auth import new_key, rotated
from gateway.tenants.key_store import FORMAT, KeyRecord, KeyStore, KeyStoreError

PEPPER = b"p" * 32


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "state")


def record(tenant: str = "acme", expires: datetime | None = None) -> KeyRecord:
    return new_key(tenant, PEPPER, expires)[1]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_names_of_secrets_and_of_a_file_written_anew_are_on_the_disk_like_their_contents(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut brings no revoked key back."""
    synced: list[tuple[bool, set[str]]] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        is_folder = os.path.samestat(os.fstat(descriptor), store.directory.stat())
        synced.append((is_folder, {path.name for path in store.directory.iterdir()}))

    monkeypatch.setattr(os, "fsync", noted)
    store.pepper()
    assert synced[-1] == (True, {"pepper"})
    store.add(record())
    assert synced[-1] == (True, {"pepper", "keys.json"})


def test_the_pepper_is_made_once_and_is_private(store: KeyStore) -> None:
    pepper = store.pepper()
    assert len(pepper) == 32
    assert store.pepper() == pepper
    assert mode(store.directory) == 0o700
    assert mode(store.directory / "pepper") == 0o600
    assert [path.name for path in store.directory.iterdir()] == ["pepper"]


def test_starts_at_the_same_time_agree_on_one_pepper(store: KeyStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        peppers = list(pool.map(lambda _: store.pepper(), range(8)))
    assert len(set(peppers)) == 1


def test_concurrent_writers_lose_nothing(store: KeyStore) -> None:
    records = [record() for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.add, records))
    assert {one.id for one in store.records()} == {one.id for one in records}


def test_everything_of_a_record_comes_back(store: KeyStore) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    _, one = new_key("acme", PEPPER, soon, ("limits",), "Zoë")
    _, one = rotated(one, PEPPER, None, soon)
    store.add(one)
    assert store.records() == [one]


def test_an_id_is_of_one_key(store: KeyStore) -> None:
    one = record()
    store.add(one)
    with pytest.raises(KeyStoreError, match=f"there is a key {one.id} already"):
        store.add(one)
    assert store.records() == [one]


def test_an_edit_that_fails_changes_nothing(store: KeyStore) -> None:
    one = record()
    store.add(one)

    def clear_and_fail() -> None:
        with store.edit() as records:
            records.clear()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        clear_and_fail()
    assert store.records() == [one]


def test_a_pepper_that_others_may_read_is_refused(store: KeyStore) -> None:
    store.pepper()
    (store.directory / "pepper").chmod(0o644)
    with pytest.raises(KeyStoreError, match="chmod 600"):
        store.pepper()


def test_a_pepper_of_another_length_is_refused(store: KeyStore) -> None:
    store.pepper()
    (store.directory / "pepper").write_bytes(b"abc")
    with pytest.raises(KeyStoreError, match="holds 3 bytes, not 32"):
        store.pepper()


def test_a_directory_that_others_may_write_is_refused(store: KeyStore) -> None:
    store.directory.mkdir()
    store.directory.chmod(0o777)
    with pytest.raises(KeyStoreError, match="chmod 700"):
        store.pepper()


ENTRY = '{"id": "a", "tenant": "b", "hmac": "00", "created": "2026-01-02T03:04:05+00:00", "scopes": [], "name": "", %s}'
FIELDS = ('"scopes": "limits"', '"name": 3', '"replaced": {"hmac": "00"}', '"expires": "2026-01-02T03:04:05"')
NAMELESS = ENTRY.replace('"a"', r'"\ud800"') % '"name": ""'
DAMAGED = ["", "{", "[]", "{}", "\x00", "[" * 100_000, '{"keys": []}']
DAMAGED_LINES = [
    "{",
    "[]",
    "null",
    "{}",
    '["id"]',
    "[" * 100_000,
    '{"id": 1}',
    '{"revoked": true}',
    '{"id": "a"}',
    NAMELESS,
    *(ENTRY % field for field in FIELDS),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_key_file_is_named(store: KeyStore, content: str) -> None:
    store.pepper()
    (store.directory / "keys.json").write_text(content)
    with pytest.raises(KeyStoreError, match=r"keys\.json is damaged"):
        store.records()


@pytest.mark.parametrize("name", ["", "a b", "tenant:acme", "x" * 65, "acme\u200b", "-a"])
def test_a_key_of_a_tenant_that_no_policy_could_name_is_refused(store: KeyStore, name: str) -> None:
    entry = json.loads(ENTRY % '"expires": null') | {"tenant": name}
    store.pepper()
    (store.directory / "keys.json").write_bytes(FORMAT + json.dumps(entry).encode() + b"\n")
    with pytest.raises(KeyStoreError, match="is no name of a tenant: 1 to 64 letters"):
        store.records()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "state"):
        with pytest.raises(KeyStoreError, match=f"^{directory} is no directory; choose one with --state-dir$"):
            KeyStore(directory).pepper()


def test_the_file_holds_hashes_only(store: KeyStore) -> None:
    key, one = new_key("acme", PEPPER)
    store.add(one)
    text = (store.directory / "keys.json").read_text()
    assert key.rpartition("-")[2] not in text
    version, entry = map(json.loads, text.splitlines())
    assert version == {"version": 2}
    assert set(entry) == {"id", "tenant", "hmac", "created", "expires", "scopes", "name"}


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of entries that are parsed from now on."""
    parsed: list[str] = []
    parse = key_store._parse

    def counted(entry: dict[str, Any]) -> KeyRecord:
        found = parse(entry)
        parsed.append(found.id)
        return found

    monkeypatch.setattr(key_store, "_parse", counted)
    return parsed


def test_a_change_of_one_key_writes_and_reads_one_line(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [record() for _ in range(30)]
    with store.edit() as records:
        records |= {one.id: one for one in (first, *others)}
    known, inode, content = store.by_id(), store.path.stat().st_ino, store.path.read_bytes()
    parsed, reader = counting(monkeypatch), KeyStore(store.directory)
    reader.by_id()
    parsed.clear()
    new = record()
    store.add(new)
    store.remove(first.id)
    _, turned = rotated(others[0], PEPPER, None, datetime.now(UTC))
    with reader.edit() as records:
        records[turned.id] = turned
    assert store.path.stat().st_ino == inode and store.path.read_bytes().startswith(content)
    assert len(store.path.read_bytes().splitlines()) == 31 + 3
    assert reader.by_id() == store.by_id() == {one.id: one for one in (turned, *others[1:], new)}
    assert sorted(parsed) == sorted(2 * [new.id] + 2 * [turned.id])
    assert all(store.by_id()[one.id] is known[one.id] for one in others[1:])


def test_a_line_that_was_cut_short_counts_for_nothing_and_is_written_over(store: KeyStore) -> None:
    one, two = record(), record()
    store.add(one)
    with store.path.open("ab") as file:
        file.write(b'{"id": "cut", "tenant": "ac')
    assert store.records() == KeyStore(store.directory).records() == [one]
    store.add(two)
    assert store.records() == KeyStore(store.directory).records() == [one, two]


def test_a_file_that_is_edited_by_hand_is_read_anew(store: KeyStore) -> None:
    one, two, three = record(), record(), record()
    for each in (one, two, three):
        store.add(each)
    lines = store.path.read_text().splitlines(keepends=True)
    for edited, left in (
        ([*lines[:2], *lines[3:]], [one, three]),
        ([*lines[:2], *lines[3:], lines[2]], [one, three, two]),
        ([line.replace(f'"{two.id}"', '"otherid"') for line in lines], [one, replace(two, id="otherid"), three]),
        (lines[:1], []),
        (lines, [one, two, three]),
    ):
        store.path.write_text("".join(edited))
        assert store.records() == left
    store.path.unlink()
    assert store.records() == []


def test_a_file_with_many_more_lines_than_keys_is_written_anew(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_store, "SPARE_LINES", 10)
    kept = record()
    store.add(kept)
    for _ in range(40):
        one = record()
        store.add(one)
        store.remove(one.id)
    assert store.records() == KeyStore(store.directory).records() == [kept]
    assert len(store.path.read_text().splitlines()) < 16


@pytest.mark.parametrize("line", DAMAGED_LINES)
def test_a_damaged_line_is_named(store: KeyStore, line: str) -> None:
    store.add(record())
    before = store.records()
    content = store.path.read_text()
    store.path.write_text(f"{content}{line}\n")
    for reader in (store, KeyStore(store.directory)):
        with pytest.raises(KeyStoreError, match=r"keys\.json is damaged \(line 3: "):
            reader.records()
    store.path.write_text(content)
    assert store.records() == before


def test_a_full_disk_leaves_the_keys_as_they_were(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    one = record()
    store.add(one)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(KeyStoreError, match="No space left on device"):
            store.add(record())
    assert store.records() == KeyStore(store.directory).records() == [one]
    store.remove(one.id)
    assert store.records() == []

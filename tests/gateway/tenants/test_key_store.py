import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.tenants.auth import new_key, rotated
from gateway.tenants.key_store import KeyRecord, KeyStore, KeyStoreError

PEPPER = b"p" * 32


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "state")


def record(tenant: str = "acme", expires: datetime | None = None) -> KeyRecord:
    return new_key(tenant, PEPPER, expires)[1]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


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


def test_records_come_back_as_they_were_added(store: KeyStore) -> None:
    added = [record(), record("other", datetime.now(UTC) + timedelta(days=3))]
    for one in added:
        store.add(one)
    assert store.records() == added
    assert mode(store.directory / "keys.json") == 0o600


def test_a_removed_record_is_gone_and_a_missing_one_is_reported(store: KeyStore) -> None:
    one, two = record(), record()
    store.add(one)
    store.add(two)
    assert store.remove(one.id)
    assert not store.remove(one.id)
    assert store.records() == [two]


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


def test_an_empty_store_has_no_records_and_makes_no_directory(store: KeyStore) -> None:
    assert store.records() == []
    assert not store.directory.exists()


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


ENTRY = '{"id": "a", "tenant": "b", "hmac": "00", "created": "2026-01-02T03:04:05+00:00", %s}'
FIELDS = ('"scopes": "limits"', '"name": 3', '"replaced": {"hmac": "00"}', '"expires": "2026-01-02T03:04:05"')
NAMELESS = ENTRY.replace('"a"', r'"\ud800"') % '"name": ""'
DAMAGED = [
    *("", "{", "[]", "{}", '{"keys": [{}]}', '{"keys": [{"id": 1}]}', "\x00"),
    *('{"keys": [null]}', '{"keys": [["id"]]}', "[" * 100_000, '{"keys": ' + "[" * 100_000),
    '{"keys": [' + NAMELESS + "]}",
    *(f'{{"keys": [{ENTRY % field}]}}' for field in FIELDS),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_key_file_is_named(store: KeyStore, content: str) -> None:
    store.pepper()
    (store.directory / "keys.json").write_text(content)
    with pytest.raises(KeyStoreError, match=r"keys\.json is damaged"):
        store.records()


@pytest.mark.parametrize("name", ["", "a b", "tenant:acme", "x" * 65, "acme\u200b", "-a"])
def test_a_key_of_a_tenant_that_no_policy_could_name_is_refused(store: KeyStore, name: str) -> None:
    entry = {"id": "a", "tenant": name, "hmac": "00", "created": "2026-01-02T03:04:05+00:00"}
    store.pepper()
    (store.directory / "keys.json").write_text(json.dumps({"keys": [entry]}))
    with pytest.raises(KeyStoreError, match="is no name of a tenant: 1 to 64 letters"):
        store.records()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyStoreError, match="--state-dir"):
        KeyStore(tmp_path / "file" / "state").pepper()


def test_the_file_holds_hashes_only(store: KeyStore) -> None:
    key, one = new_key("acme", PEPPER)
    store.add(one)
    text = (store.directory / "keys.json").read_text()
    assert key.rpartition("-")[2] not in text
    (entry,) = json.loads(text)["keys"]
    assert set(entry) == {"id", "tenant", "hmac", "created", "expires", "scopes", "name"}

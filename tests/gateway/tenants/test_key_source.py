import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.background import beside
from gateway.errors import InvalidApiKey
from gateway.settings.settings import Settings
from gateway.tenants import auth
from gateway.tenants.auth import KeyRing, Principal, new_key, rotated
from gateway.tenants.key_source import KeyChange, KeySource
from gateway.tenants.key_store import KeyRecord, KeyStore, KeyStoreError
from gateway.tenants.live_policy import LivePolicy
from quotas.policy.policy import CLASSES, DEFAULTS, KeyPolicy, Policy, TenantPolicy

EMPTY = Policy.of(CLASSES, DEFAULTS)


def settings(state_dir: Path, **chosen: Any) -> Settings:
    return Settings(**{"state_dir": state_dir, "demo_key": None, "pepper": None, **chosen})


def opened(chosen: Settings, policy: Policy = EMPTY) -> tuple[KeyRing, str | None]:
    source = KeySource(chosen, policy)
    return source.ring, source.demo_key


def policy_with(*keys: KeyPolicy) -> Policy:
    acme = TenantPolicy("acme", "interactive", "standard", keys={key.id: key for key in keys})
    return Policy.of(CLASSES, DEFAULTS, {"acme": acme})


def stored(folder: Path) -> tuple[KeyStore, str, KeyRecord]:
    """A store with a key of acme's."""
    store = KeyStore(folder)
    key, record = new_key("acme", store.pepper())
    store.add(record)
    return store, key, record


def tenant_of(ring: KeyRing, key: str) -> str | None:
    try:
        return ring.authenticate(f"Bearer {key}".encode()).tenant
    except InvalidApiKey:
        return None


def test_the_demo_key_is_the_same_at_every_start_and_is_stored_nowhere(tmp_path: Path) -> None:
    first, key = opened(settings(tmp_path))
    _, again = opened(settings(tmp_path))
    assert key is not None
    assert key == again
    assert key.startswith("sk-sluice-demo-")
    assert first.authenticate(f"Bearer {key}".encode()) == Principal("demo", "demo")
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.iterdir())


def test_another_state_directory_has_another_demo_key(tmp_path: Path) -> None:
    _, one = opened(settings(tmp_path / "one"))
    _, two = opened(settings(tmp_path / "two"))
    assert one != two


@pytest.mark.parametrize("chosen", ["my-demo-key!", "sk-sluice-mine-0123456789", "sk-sluice-", "sk-other-provider"])
def test_an_operator_may_choose_the_demo_key(tmp_path: Path, chosen: str) -> None:
    ring, key = opened(settings(tmp_path, demo_key=chosen))
    assert key == chosen
    assert ring.authenticate(f"Bearer {chosen}".encode()).tenant == "demo"
    with pytest.raises(InvalidApiKey):
        ring.authenticate(f"Bearer {chosen}x".encode())


def test_a_public_address_has_no_demo_key_unless_one_is_chosen(tmp_path: Path) -> None:
    with pytest.raises(KeyStoreError, match="SLUICE_DEMO_KEY"):
        opened(settings(tmp_path, host="0.0.0.0"))
    _, key = opened(settings(tmp_path, host="0.0.0.0", demo_key="chosen-key"))
    assert key == "chosen-key"


def test_a_public_address_serves_stored_keys_alone(tmp_path: Path) -> None:
    _, key, _ = stored(tmp_path)
    ring, demo = opened(settings(tmp_path, host="0.0.0.0"))
    assert demo is None
    assert len(ring) == 1
    assert ring.authenticate(f"Bearer {key}".encode()).tenant == "acme"


def test_a_demo_key_that_takes_a_stored_id_is_refused(tmp_path: Path) -> None:
    _, _, record = stored(tmp_path)
    with pytest.raises(KeyStoreError, match="two API keys have the id"):
        opened(settings(tmp_path, demo_key=f"sk-sluice-{record.id}-0123456789"))


def test_replicas_that_share_a_pepper_share_the_demo_key_and_need_no_directory(tmp_path: Path) -> None:
    shared = "a-pepper-that-two-replicas-have-in-common"
    _, one = opened(settings(tmp_path / "one", pepper=shared))
    _, two = opened(settings(tmp_path / "two", pepper=shared))
    assert one == two
    assert not (tmp_path / "one").exists()


def test_a_key_in_a_policy_file_opens_for_its_tenant(tmp_path: Path) -> None:
    key, record = new_key("tenant", KeyStore(tmp_path).pepper())
    ring, _ = opened(settings(tmp_path), policy_with(KeyPolicy(record.id, hmac=record.digest.hex())))
    assert ring.authenticate(f"Bearer {key}".encode()) == Principal("acme", record.id)


def test_a_policy_may_end_a_stored_key_earlier(tmp_path: Path) -> None:
    _, key, record = stored(tmp_path)
    past = datetime.now(UTC) - timedelta(seconds=1)
    ring, _ = opened(settings(tmp_path), policy_with(KeyPolicy(record.id, expires=past)))
    assert tenant_of(ring, key) is None


def test_the_end_that_a_policy_sets_holds_for_a_replaced_secret_too(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    old, record = new_key("acme", store.pepper())
    now = datetime.now(UTC)
    new, record = rotated(record, store.pepper(), None, now + timedelta(days=2))
    store.add(record)
    ring, _ = opened(settings(tmp_path), policy_with(KeyPolicy(record.id, expires=now - timedelta(seconds=1))))
    assert tenant_of(ring, old) is tenant_of(ring, new) is None
    ring, _ = opened(settings(tmp_path), policy_with(KeyPolicy(record.id, expires=now + timedelta(days=1))))
    assert (tenant_of(ring, old), tenant_of(ring, new)) == ("acme", "acme")


def test_a_key_in_a_policy_file_has_the_scopes_that_it_says(tmp_path: Path) -> None:
    key, record = new_key("tenant", KeyStore(tmp_path).pepper())
    ring, _ = opened(settings(tmp_path), policy_with(KeyPolicy(record.id, record.digest.hex(), scopes=("limits",))))
    assert ring.authenticate(f"Bearer {key}".encode()).scopes == ("limits",)


async def test_keys_come_and_go_while_the_gateway_runs(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    stored_key, in_store = new_key("stored", store.pepper())
    policy_key, in_policy = new_key("acme", store.pepper())
    source = KeySource(settings(tmp_path), EMPTY)
    assert tenant_of(source.ring, stored_key) is tenant_of(source.ring, policy_key) is None
    store.add(in_store)
    await source.reload()
    await source.take_policy(policy_with(KeyPolicy(in_policy.id, hmac=in_policy.digest.hex())))
    assert (tenant_of(source.ring, stored_key), tenant_of(source.ring, policy_key)) == ("stored", "acme")
    store.remove(in_store.id)
    await source.take_policy(EMPTY)
    assert tenant_of(source.ring, stored_key) is tenant_of(source.ring, policy_key) is None


async def test_the_listener_is_told_which_keys_have_changed(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    store = KeyStore(tmp_path)
    records = [new_key("acme", store.pepper())[1] for _ in range(3)]
    for record in records[:2]:
        store.add(record)
    source = KeySource(chosen, EMPTY)
    told: list[KeyChange] = []

    async def tell(change: KeyChange) -> None:
        told.append(change)

    source.on_change.append(tell)
    await source.reload()
    assert told == []
    with store.edit() as stored:
        until = datetime.now(UTC) + timedelta(days=1)
        stored[records[0].id] = rotated(records[0], store.pepper(), None, until)[1]
        del stored[records[1].id]
        stored[records[2].id] = records[2]
    await source.reload()
    assert told == [KeyChange((records[2].id,), (records[0].id,), (records[1].id,))]
    assert str(told[0]) == f"added {records[2].id}; changed {records[0].id}; removed {records[1].id}"


async def test_a_damaged_key_file_changes_nothing(tmp_path: Path) -> None:
    store, key, _ = stored(tmp_path)
    source = KeySource(settings(tmp_path), EMPTY)
    store.path.write_text("{")
    await source.reload()
    assert tenant_of(source.ring, key) == "acme"


async def test_an_edit_while_the_key_file_cannot_be_read_is_followed_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A revocation in the key file, and a key of a policy, which the watch of policies has taken up."""
    store, revoked, record = stored(tmp_path)
    added, in_policy = new_key("acme", store.pepper())
    source = KeySource(settings(tmp_path), EMPTY)

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    store.remove(record.id)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        for _ in range(5):
            await source._watcher.poll()
        await source.take_policy(policy_with(KeyPolicy(in_policy.id, hmac=in_policy.digest.hex())))
    assert (tenant_of(source.ring, revoked), tenant_of(source.ring, added)) == ("acme", None)
    assert caplog.text.count("Too many open files") == 1
    await source._watcher.poll()
    assert (tenant_of(source.ring, revoked), tenant_of(source.ring, added)) == (None, "acme")


async def beside_a_slow_reload(source: KeySource, act: Callable[[], Coroutine[None, None, None]]) -> None:
    """`act` while a reload has read the key file and not yet taken up what it read."""
    has_read, may_go_on, read = threading.Event(), threading.Event(), KeyStore.by_id

    def read_slowly(store: KeyStore) -> Mapping[str, KeyRecord]:
        records = read(store)
        if not has_read.is_set():
            has_read.set()
            may_go_on.wait()
        return records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyStore, "by_id", read_slowly)
        slow = asyncio.create_task(source.reload())
        await asyncio.to_thread(has_read.wait)
        quick = asyncio.create_task(act())
        for _ in range(3):
            await asyncio.to_thread(tuple)
        may_go_on.set()
        await asyncio.gather(slow, quick)


async def test_a_key_that_is_revoked_during_a_reload_does_not_come_back(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key, record = new_key("acme", store.pepper())
    source = KeySource(settings(tmp_path), EMPTY)
    store.add(record)

    async def revoke() -> None:
        store.remove(record.id)
        await source.reload()

    await beside_a_slow_reload(source, revoke)
    assert tenant_of(source.ring, key) is None


async def test_a_policy_that_comes_during_a_reload_holds(tmp_path: Path) -> None:
    key, record = new_key("acme", KeyStore(tmp_path).pepper())
    source = KeySource(settings(tmp_path), EMPTY)
    policy = policy_with(KeyPolicy(record.id, hmac=record.digest.hex()))
    await beside_a_slow_reload(source, lambda: source.take_policy(policy))
    assert tenant_of(source.ring, key) == "acme"


async def test_a_key_that_is_revoked_before_the_files_are_watched_opens_no_more(tmp_path: Path) -> None:
    """As while the model loads."""
    store, key, record = stored(tmp_path)
    revoked = asyncio.Event()

    async def tell(_: object) -> None:
        revoked.set()

    keys = KeySource(Settings(state_dir=tmp_path), EMPTY)
    assert keys.ring.authenticate(f"Bearer {key}".encode()).tenant == "acme"
    store.remove(record.id)
    keys.on_change.append(tell)
    async with beside(keys.follow(LivePolicy(None))):
        await revoked.wait()
    assert not keys.ring.of_tenant("acme")


async def test_a_change_of_one_key_of_many_is_made_of_that_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(tmp_path)
    old = [new_key(f"t{number}", store.pepper())[1] for number in range(50)]
    with store.edit() as stored:
        stored |= {record.id: record for record in old}
    ids = {record.tenant: record.id for record in old}
    source = KeySource(settings(tmp_path), EMPTY)
    made: list[str] = []
    make = auth._Entry.of

    def counted(record: KeyRecord) -> object:
        made.append(record.id)
        return make(record)

    monkeypatch.setattr(auth._Entry, "of", counted)
    key, added = new_key("acme", store.pepper())
    store.add(added)
    await source.reload()
    assert (made, tenant_of(source.ring, key)) == ([added.id], "acme")
    ends = KeyPolicy(ids["t7"], expires=datetime.now(UTC) + timedelta(days=1))
    tenants = {name: TenantPolicy(name, "interactive", "standard") for name in ids}
    narrowed = TenantPolicy("t7", "interactive", "standard", keys={ends.id: ends})
    await source.take_policy(Policy.of(CLASSES, DEFAULTS, tenants))
    await source.take_policy(Policy.of(CLASSES, DEFAULTS, tenants | {"t7": narrowed}))
    assert made == [added.id, ids["t7"]]
    await source.take_policy(Policy.of(CLASSES, DEFAULTS, {"t7": narrowed}))
    assert made == [added.id, ids["t7"]]
    store.remove(ids["t3"])
    await source.reload()
    assert made == [added.id, ids["t7"]] and len(source.ring) == len(source.in_force) == 51


async def test_a_key_of_a_policy_may_move_to_another_tenant_of_it(tmp_path: Path) -> None:
    key, record = new_key("tenant", KeyStore(tmp_path).pepper())
    policy = KeyPolicy(record.id, hmac=record.digest.hex())
    names = ("acme", "globex")
    source = KeySource(settings(tmp_path), EMPTY)
    for owner in (*names, *names):
        tenants = {
            name: TenantPolicy(name, "interactive", "standard", keys={record.id: policy} if name == owner else {})
            for name in names
        }
        await source.take_policy(Policy.of(CLASSES, DEFAULTS, tenants))
        assert tenant_of(source.ring, key) == owner
        assert [one.key_id for one in source.ring.of_tenant(owner)] == [record.id]
        assert {*source.ring.tenants()} == {"demo", owner}


async def test_a_stored_key_that_a_policy_comes_to_have_as_well_changes_nothing_until_one_goes(tmp_path: Path) -> None:
    store, key, record = stored(tmp_path)
    source = KeySource(settings(tmp_path), EMPTY)
    twice = policy_with(KeyPolicy(record.id, hmac="ab" * 32))
    other, added = new_key("globex", store.pepper())
    store.add(added)
    await source.take_policy(twice)
    assert (tenant_of(source.ring, key), tenant_of(source.ring, other)) == ("acme", None)
    store.remove(record.id)
    await source.reload()
    assert (tenant_of(source.ring, key), tenant_of(source.ring, other)) == (None, "globex")
    assert [one.key_id for one in source.ring.of_tenant("acme")] == [record.id]


def test_keys_of_a_tenant_are_found_without_a_look_at_other_tenants(tmp_path: Path) -> None:
    class Unwalked(dict[Any, Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError

        values = items = __iter__  # type: ignore[assignment]

    _, _, record = stored(tmp_path)
    ring, _ = opened(settings(tmp_path))
    ring._entries, ring._by_tenant = Unwalked(ring._entries), Unwalked(ring._by_tenant)
    assert [one.key_id for one in ring.of_tenant("acme")] == [record.id]
    assert ring.of_tenant("nobody") == []

"""API keys: what opens the gateway and what does not, and that no key is kept."""

import hmac
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth import KeyRing, Principal, new_key, open_key_ring
from gateway.errors import InvalidApiKey
from gateway.key_store import KeyStore, KeyStoreError
from gateway.settings import Settings

PEPPER = b"p" * 32
KEY, RECORD = new_key("acme", PEPPER)
RING = KeyRing(PEPPER, [RECORD])


def settings(state_dir: Path, **chosen: Any) -> Settings:
    return Settings(**{"state_dir": state_dir, "demo_key": None, "pepper": None, **chosen})


@pytest.mark.parametrize(
    "form", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer   {}", "Bearer\t{}", " Bearer {} ", "Bearer {}\t"]
)
def test_a_key_opens_however_the_header_is_spaced_and_cased(form: str) -> None:
    assert RING.authenticate(form.format(KEY).encode()) == Principal("acme", RECORD.id)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic dXNlcjpwYXNz",
        KEY.encode(),
        b"Bearer " + KEY.encode() + b" extra",
        b"Bearer " + KEY.encode()[:-1],
        b"Bearer " + KEY.encode() + b"0",
        b"Bearer " + KEY.upper().encode(),
        b"Bearer sk-sluice-",
        b"Bearer sk-sluice--",
        b"Bearer sk-sluice-00000000-" + b"0" * 40,
        b"Bearer \xff\xfe\x00",
        b"Bearer " + "schlüssel".encode(),
        b"Bearer demo",
    ],
)
def test_anything_else_is_refused(header: bytes | None) -> None:
    with pytest.raises(InvalidApiKey) as refused:
        RING.authenticate(header)
    assert refused.value.status == 401
    assert refused.value.code == "invalid_api_key"


@given(st.binary(max_size=700))
def test_no_bytes_make_it_fail_in_another_way(noise: bytes) -> None:
    for header in (noise, b"Bearer " + noise, b"Bearer sk-sluice-" + RECORD.id.encode() + b"-" + noise):
        with pytest.raises(InvalidApiKey):
            RING.authenticate(header)


def test_a_huge_key_is_refused_before_it_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hmac, "digest")
    with pytest.raises(InvalidApiKey, match="longer than 512 bytes"):
        RING.authenticate(b"Bearer " + b"x" * 1_000_000)


def test_an_unknown_key_costs_the_work_of_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, work: Callable[..., object]) -> None:
        def call(*arguments: object) -> object:
            calls.append(name)
            return work(*arguments)

        monkeypatch.setattr(hmac, name, call)

    counted("digest", hmac.digest)
    counted("compare_digest", hmac.compare_digest)
    for header in (b"Bearer " + KEY.encode()[:-1] + b"x", b"Bearer sk-sluice-ffffffff-" + b"0" * 40, b"Bearer other"):
        calls.clear()
        with pytest.raises(InvalidApiKey):
            RING.authenticate(header)
        assert calls == ["digest", "compare_digest"]


def test_a_refusal_does_not_repeat_the_key() -> None:
    with pytest.raises(InvalidApiKey) as refused:
        RING.authenticate(b"Bearer " + KEY.encode() + b"x")
    assert KEY not in str(refused.value)


def test_a_key_opens_until_the_second_it_expires() -> None:
    expires = datetime.now(UTC) + timedelta(days=1)
    key, record = new_key("acme", PEPPER, expires)
    now = expires.timestamp() - 1
    ring = KeyRing(PEPPER, [record], clock=lambda: now)
    assert ring.authenticate(b"Bearer " + key.encode()).tenant == "acme"
    now += 1
    with pytest.raises(InvalidApiKey):
        ring.authenticate(b"Bearer " + key.encode())


def test_another_pepper_opens_nothing() -> None:
    with pytest.raises(InvalidApiKey):
        KeyRing(b"q" * 32, [RECORD]).authenticate(b"Bearer " + KEY.encode())


def test_the_demo_key_is_the_same_at_every_start_and_is_stored_nowhere(tmp_path: Path) -> None:
    first, key = open_key_ring(settings(tmp_path))
    _, again = open_key_ring(settings(tmp_path))
    assert key is not None
    assert key == again
    assert key.startswith("sk-sluice-demo-")
    assert first.authenticate(f"Bearer {key}".encode()) == Principal("demo", "demo")
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.iterdir())


def test_another_state_directory_has_another_demo_key(tmp_path: Path) -> None:
    _, one = open_key_ring(settings(tmp_path / "one"))
    _, two = open_key_ring(settings(tmp_path / "two"))
    assert one != two


@pytest.mark.parametrize("chosen", ["my-demo-key!", "sk-sluice-mine-0123456789", "sk-sluice-", "sk-other-provider"])
def test_an_operator_may_choose_the_demo_key(tmp_path: Path, chosen: str) -> None:
    ring, key = open_key_ring(settings(tmp_path, demo_key=chosen))
    assert key == chosen
    assert ring.authenticate(f"Bearer {chosen}".encode()).tenant == "demo"
    with pytest.raises(InvalidApiKey):
        ring.authenticate(f"Bearer {chosen}x".encode())


def test_a_public_address_has_no_demo_key_unless_one_is_chosen(tmp_path: Path) -> None:
    with pytest.raises(KeyStoreError, match="SLUICE_DEMO_KEY"):
        open_key_ring(settings(tmp_path, host="0.0.0.0"))
    _, key = open_key_ring(settings(tmp_path, host="0.0.0.0", demo_key="chosen-key"))
    assert key == "chosen-key"


def test_a_public_address_serves_stored_keys_alone(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key, record = new_key("acme", store.pepper())
    store.add(record)
    ring, demo = open_key_ring(settings(tmp_path, host="0.0.0.0"))
    assert demo is None
    assert len(ring) == 1
    assert ring.authenticate(f"Bearer {key}".encode()).tenant == "acme"


def test_a_demo_key_that_takes_a_stored_id_is_refused(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    _, record = new_key("acme", store.pepper())
    store.add(record)
    with pytest.raises(KeyStoreError, match="two keys of one id"):
        open_key_ring(settings(tmp_path, demo_key=f"sk-sluice-{record.id}-0123456789"))


def test_replicas_that_share_a_pepper_share_the_demo_key_and_need_no_directory(tmp_path: Path) -> None:
    shared = "s" * 40
    _, one = open_key_ring(settings(tmp_path / "one", pepper=shared))
    _, two = open_key_ring(settings(tmp_path / "two", pepper=shared))
    assert one == two
    assert not (tmp_path / "one").exists()


def test_nothing_that_is_kept_shows_a_key_or_its_digest() -> None:
    assert KEY not in repr(RECORD)
    assert RECORD.digest.hex() not in repr(RECORD)
    assert str(RECORD.digest) not in repr(RECORD)

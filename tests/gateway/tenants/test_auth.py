import hmac
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidApiKey
from gateway.tenants.auth import KeyRing, Principal, new_key, rotated

PEPPER = b"p" * 32
KEY, RECORD = new_key("acme", PEPPER)
RING = KeyRing(PEPPER, [RECORD])


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
    ids=map(str, range(16)),  # a key of this process would name the tests otherwise in every other one
)
def test_anything_else_is_refused(header: bytes | None) -> None:
    with pytest.raises(InvalidApiKey) as refused:
        RING.authenticate(header)
    assert refused.value.status == 401
    assert refused.value.code == "invalid_api_key"


def test_an_admin_sees_whose_keys_there_are_and_what_they_stand_for() -> None:
    other = new_key("other", PEPPER, scopes=("limits",))[1]
    ring = KeyRing(PEPPER, [RECORD, other])
    assert ring.tenants() == {"acme", "other"}
    assert ring.of_tenant("other") == [Principal("other", other.id, ("limits",))]
    assert ring.of_tenant("nobody") == []


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

    def counted(owner: object, name: str) -> None:
        work: Callable[..., object] = getattr(owner, name)

        def call(*arguments: object) -> object:
            calls.append(name)
            return work(*arguments)

        monkeypatch.setattr(owner, name, call)

    counted(hmac.HMAC, "digest")
    counted(hmac, "compare_digest")
    for header in (b"Bearer " + KEY.encode()[:-1] + b"x", b"Bearer sk-sluice-ffffffff-" + b"0" * 40, b"Bearer other"):
        calls.clear()
        with pytest.raises(InvalidApiKey):
            RING.authenticate(header)
        assert calls == ["digest", "compare_digest", "compare_digest"]


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


def test_a_rotated_key_opens_with_both_secrets_until_the_old_one_ends() -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    new, record = rotated(RECORD, PEPPER, None, until)
    now = until.timestamp() - 1
    ring = KeyRing(PEPPER, [record], clock=lambda: now)
    opened = [ring.authenticate(b"Bearer " + key.encode()) for key in (KEY, new)]
    assert opened == [Principal("acme", RECORD.id)] * 2
    now += 1
    assert ring.authenticate(b"Bearer " + new.encode()) == opened[0]
    with pytest.raises(InvalidApiKey):
        ring.authenticate(b"Bearer " + KEY.encode())


@pytest.mark.parametrize(("before", "after"), [(None, 1), (1, None), (1, 3), (3, 1), (1, 1)])
def test_a_replaced_secret_outlives_neither_its_own_expiry_nor_the_keys(before: int | None, after: int | None) -> None:
    now = datetime.now(UTC)
    first, second = (hours and now + timedelta(hours=hours) for hours in (before, after))
    _, record = rotated(replace(RECORD, expires=first), PEPPER, second, now + timedelta(hours=2))
    assert record.replaced and record.replaced.expires == now + timedelta(hours=1)


def test_another_pepper_opens_nothing() -> None:
    with pytest.raises(InvalidApiKey):
        KeyRing(b"q" * 32, [RECORD]).authenticate(b"Bearer " + KEY.encode())


def test_nothing_that_is_kept_of_a_rotated_key_shows_a_digest() -> None:
    _, record = rotated(RECORD, PEPPER, None, datetime.now(UTC))
    for digest in (record.digest, RECORD.digest):
        assert digest.hex() not in repr(record)
        assert str(digest) not in repr(record)


def test_nothing_that_is_kept_shows_a_key_or_its_digest() -> None:
    assert KEY not in repr(RECORD)
    assert RECORD.digest.hex() not in repr(RECORD)
    assert str(RECORD.digest) not in repr(RECORD)

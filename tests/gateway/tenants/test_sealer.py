from collections.abc import Callable
from hashlib import sha256
from os import urandom

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from gateway.settings.settings import Settings
from gateway.tenants.sealer import Sealer

OLD, NEW = b"0" * 32, b"1" * 32


@given(tenant=st.text(), name=st.text(), contents=st.binary())
def test_a_sealed_value_opens_for_its_tenant_and_name_alone_and_shows_nothing(
    tenant: str, name: str, contents: bytes
) -> None:
    sealer = Sealer([OLD])
    sealed = sealer.seal(tenant, name, contents)
    assert sealer.open(tenant, name, sealed) == contents
    assert sealer.open(tenant + "x", name, sealed) is sealer.open(tenant, name + "x", sealed) is None
    assert sealer.seal(tenant, name, contents) != sealed
    assert len(contents) < 8 or contents not in sealed


@pytest.mark.parametrize("place", [0, 4, 16, 20, -1])
def test_a_tampered_value_does_not_open(place: int) -> None:
    sealed = bytearray(Sealer([OLD]).seal("acme", "a", b"contents"))
    sealed[place] ^= 1
    assert Sealer([OLD]).open("acme", "a", bytes(sealed)) is None
    assert Sealer([OLD]).open("acme", "a", bytes(sealed[:place])) is None


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 2**20])
@pytest.mark.parametrize("make", [bytes, urandom])
def test_contents_open_within_a_bound_that_they_meet_and_within_none_that_they_exceed(
    size: int, make: Callable[[int], bytes]
) -> None:
    contents = make(size)
    sealed = Sealer([OLD]).seal("acme", "a", contents)
    for most in {0, 1, size // 2, size - 1, size, size + 1, 2 * size}:
        opened = contents if size <= most else None
        assert Sealer([OLD]).open("acme", "a", sealed, most) == opened, most
    assert Sealer([OLD]).open("acme", "a", sealed) == contents


def test_a_secret_that_was_replaced_opens_as_long_as_it_is_kept_and_seals_nothing() -> None:
    sealed = Sealer([OLD]).seal("acme", "a", b"contents")
    assert Sealer([NEW, OLD]).open("acme", "a", sealed) == b"contents"
    assert Sealer([NEW]).open("acme", "a", sealed) is None
    assert Sealer([OLD]).open("acme", "a", Sealer([NEW, OLD]).seal("acme", "a", b"contents")) is None


def test_old_secrets_may_have_spaces_around_them() -> None:
    old = [f"{number}" * 32 for number in range(3)]
    sealer = Sealer.of(Settings(old_storage_secrets=SecretStr(f" {old[0]}, {old[1]} ,{old[2]}, ,\n")), b"pepper")
    for secret in old:
        assert sealer.open("acme", "a", Sealer([secret.encode()]).seal("acme", "a", b"contents")) == b"contents"
    assert len(sealer._secrets) == len(old) + 1


def test_settings_name_the_secrets_and_without_any_one_follows_from_the_pepper() -> None:
    new, old = (sha256(secret).hexdigest() for secret in (NEW, OLD))
    settings = Settings(storage_secret=SecretStr(new), old_storage_secrets=SecretStr(old))
    sealed = Sealer([old.encode()]).seal("acme", "a", b"contents")
    assert Sealer.of(settings, b"pepper").open("acme", "a", sealed) == b"contents"
    assert Sealer([new.encode()]).open("acme", "a", Sealer.of(settings, b"x").seal("acme", "a", b"y")) == b"y"
    derived = Sealer.of(Settings(), b"pepper").seal("acme", "a", b"contents")
    assert Sealer.of(Settings(), b"pepper").open("acme", "a", derived) == b"contents"
    assert Sealer.of(Settings(), b"other").open("acme", "a", derived) is None

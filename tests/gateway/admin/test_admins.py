"""Admins with keys of their own: who opens what, from when and until when."""

from errno import EMFILE
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.admin.actions import Actions
from gateway.admin.admins import Admin, AdminKeys, AdminStore, Role
from gateway.admin.api import PREFIX, Api
from gateway.errors import InvalidApiKey, RoleNotAllowed
from gateway.tenants.key_store import KeyStore, KeyStoreError

OWNER = "correct-horse-battery"


@pytest.fixture
def store(tmp_path: Path) -> AdminStore:
    return AdminStore(KeyStore(tmp_path / "state"))


@pytest.fixture
def keys(store: AdminStore) -> AdminKeys:
    return AdminKeys(OWNER, store)


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_a_key_opens_from_its_creation_until_it_is_revoked(store: AdminStore, keys: AdminKeys) -> None:
    key = store.create("ada", Role.OPERATOR)
    assert (keys.admin(bearer(key)).name, keys.admin(bearer(key)).role) == ("ada", Role.OPERATOR)
    store.create("bob", Role.VIEWER)
    assert keys.admin(bearer(key)).name == "ada"
    store.revoke("ada")
    with pytest.raises(InvalidApiKey):
        keys.admin(bearer(key))
    assert keys.admin(bearer(OWNER)).role is Role.ADMIN


def test_the_file_holds_no_key_and_is_private(store: AdminStore) -> None:
    key = store.create("ada", Role.ADMIN)
    assert key not in store.path.read_text()
    assert store.path.stat().st_mode & 0o777 == 0o600


def test_a_role_includes_the_ones_before_it(store: AdminStore, keys: AdminKeys) -> None:
    for place, role in enumerate(Role):
        admin = keys.admin(bearer(store.create(role, role)))
        for lesser in [*Role][: place + 1]:
            admin.require(lesser)
        for greater in [*Role][place + 1 :]:
            with pytest.raises(RoleNotAllowed, match=f"{role} has the role {role}; this needs {greater}"):
                admin.require(greater)


def test_a_name_is_taken_once(store: AdminStore) -> None:
    store.create("ada", Role.VIEWER)
    with pytest.raises(KeyStoreError, match="there is an admin ada already"):
        store.create("ada", Role.ADMIN)
    with pytest.raises(KeyStoreError, match="there is no admin bob"):
        store.revoke("bob")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        pytest.param("[" * 100_000, id="nested"),
        '{"ada": 1}',
        '{"ada": {"role": "god", "sha256": "00", "created": ""}}',
    ],
)
def test_while_the_file_is_damaged_only_the_owner_comes_in(
    store: AdminStore, keys: AdminKeys, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = store.create("ada", Role.ADMIN)
    keys.admin(bearer(key))
    store.path.write_text(content)
    with pytest.raises(InvalidApiKey):
        keys.admin(bearer(key))
    assert keys.admin(bearer(OWNER)).role is Role.ADMIN
    assert "only the owner's key opens the admin port" in caplog.text
    with pytest.raises(KeyStoreError, match="damaged"):
        store.create("bob", Role.VIEWER)


def test_a_file_that_others_may_read_is_not_trusted(store: AdminStore, keys: AdminKeys) -> None:
    key = store.create("ada", Role.ADMIN)
    store.path.chmod(0o644)
    with pytest.raises(InvalidApiKey):
        keys.admin(bearer(key))
    store.path.chmod(0o600)  # the remedy that the message names
    assert keys.admin(bearer(key)).name == "ada"


def test_a_file_that_could_not_be_read_is_read_again(
    store: AdminStore, keys: AdminKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = store.create("ada", Role.ADMIN)
    with monkeypatch.context() as patched:
        patched.setattr(AdminStore, "read", Mock(side_effect=OSError(EMFILE, "Too many open files")))
        with pytest.raises(InvalidApiKey):
            keys.admin(bearer(key))
    assert keys.admin(bearer(key)).name == "ada"


READS = {f"{PREFIX}/policy/check", f"{PREFIX}/policy/what-if"}  # posted because they take a text


async def test_no_route_lets_a_viewer_change_anything() -> None:
    viewer = Admin("ada", Role.VIEWER, b"")
    routes = Api.routes(Mock(spec=Api), Mock(spec=Actions))
    closed = [one for one in routes if one.methods != {"GET", "HEAD"} and one.path not in READS]
    assert len(closed) == 14
    for route in [*closed, next(one for one in routes if one.path == f"{PREFIX}/policy/source")]:
        with pytest.raises(RoleNotAllowed):
            await route.app({"type": "http", "user": viewer}, AsyncMock(), AsyncMock())

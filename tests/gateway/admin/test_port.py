import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.admin.admins import AdminKeys
from gateway.admin.port import admin_keys, open_admin_port
from gateway.errors import InvalidApiKey
from gateway.http.server import ListenError
from gateway.settings.settings import Settings
from gateway.tenants.key_store import KeyStoreError


def settings(tmp_path: Path, **changes: object) -> Settings:
    fields: dict[str, Any] = {"state_dir": tmp_path / "state", "admin_port": 0} | changes
    return Settings(**fields)


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    first, second = admin_keys(settings(tmp_path)), admin_keys(settings(tmp_path))
    path = tmp_path / "state" / "admin-key"
    assert path.stat().st_mode & 0o777 == 0o600
    key = f"Bearer {path.read_text().strip()}".encode()
    assert first.admin(key) == second.admin(key)
    assert path.read_text().strip() not in repr(vars(first))


def test_a_configured_key_is_the_only_one(tmp_path: Path) -> None:
    key = admin_keys(settings(tmp_path, admin_key="correct-horse-battery"))
    key.admin(b"bearer  correct-horse-battery ")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "authorization", [None, b"", b"Bearer", b"Bearer other-key-of-sixteen", b"Basic correct-horse-battery", b"B" * 5000]
)
def test_anything_but_the_key_is_refused(authorization: bytes | None) -> None:
    with pytest.raises(InvalidApiKey):
        AdminKeys("correct-horse-battery").admin(authorization)


@pytest.mark.parametrize(
    "content", ["", "short", "x" * 513, "with a space in it, sixteen long", "umlaut-ü-umlaut-ü-umlaut"]
)
def test_a_key_file_that_holds_no_key_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    path = tmp_path / "state" / "admin-key"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(KeyStoreError, match="admin-key must hold 16 to 512 printable"):
        admin_keys(settings(tmp_path))


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    admin_keys(settings(tmp_path))
    (tmp_path / "state" / "admin-key").chmod(0o644)
    with pytest.raises(KeyStoreError, match="chmod 600"):
        admin_keys(settings(tmp_path))


@pytest.mark.parametrize("key", ["short", "x" * 513, "with a space in it, sixteen long"])
def test_a_configured_key_must_be_long_and_printable(key: str) -> None:
    with pytest.raises(ValidationError, match="must be 16 to 512 printable ASCII characters"):
        Settings(admin_key=key)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "admin.example"])
def test_an_address_that_others_can_reach_needs_a_key_that_was_chosen(host: str) -> None:
    with pytest.raises(ValidationError, match=f"--admin-host {host} .*set SLUICE_ADMIN_KEY"):
        Settings(admin_host=host)
    Settings(admin_host=host, admin_key="correct-horse-battery")
    Settings(admin_host=host, admin_port="off")
    Settings(admin_host="::1")


def test_a_port_of_its_own_choice_is_known_before_it_listens(tmp_path: Path) -> None:
    with open_admin_port(settings(tmp_path)) as port:
        assert port is not None
        assert port.number > 0
    assert port.sock.fileno() == -1


def test_off_is_no_port_and_makes_no_key(tmp_path: Path) -> None:
    with open_admin_port(settings(tmp_path, admin_port="off")) as port:
        assert port is None
    assert not (tmp_path / "state").exists()


def test_a_port_that_is_taken_is_named_with_the_flag_that_helps(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with (
            pytest.raises(ListenError, match=f"127.0.0.1:{taken} is in use: .* with --admin-port"),
            open_admin_port(settings(tmp_path, admin_port=taken)),
        ):
            pass

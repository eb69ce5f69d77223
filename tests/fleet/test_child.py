"""A replica as a child process, with a program that stands in for `sluice serve`."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backend.bound_process import bound
from fleet.child import ChildFailed, ChildReplica, settings_of
from gateway.cli.flags import SettingsError
from tests.gateway.server_process import ROOT, eventually
from tests.quotas.stores import is_running

PROGRAM = "tests.fleet.paper_child"


@asynccontextmanager
async def child(folder: Path) -> AsyncIterator[tuple[ChildReplica, asyncio.Event]]:
    """A serving child, and the event set once it is lost."""
    lost = asyncio.Event()
    replica = ChildReplica([f"--state-dir={folder}"], lost.set, PROGRAM)
    await replica.start()
    try:
        yield replica, lost
    finally:
        await replica.stop()


async def test_a_child_is_asked_how_it_is_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    async with child(tmp_path) as (replica, lost):
        await replica.check()
        assert (await replica.state()).replicas_wanted == 1.5
    assert not lost.is_set()
    assert not is_running(replica.pid)


async def test_a_child_that_ends_by_itself_is_lost(tmp_path: Path) -> None:
    async with child(tmp_path) as (replica, lost):
        os.kill(replica.pid, signal.SIGKILL)
        await lost.wait()
        with pytest.raises(ChildFailed, match="does not answer"):
            await replica.check()


async def test_a_child_that_does_not_start_says_so() -> None:
    with pytest.raises(ChildFailed, match="status 1 before it served"):
        await ChildReplica(["--model=none"], program=PROGRAM).start()


def test_the_child_of_a_killed_parent_is_told_to_stop(tmp_path: Path) -> None:
    code = f"""
import asyncio
from fleet.child import ChildReplica
async def main():
    replica = ChildReplica([], program={PROGRAM!r})
    await replica.start()
    print(replica.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = subprocess.Popen(**bound([sys.executable, "-c", code]), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.communicate()
    eventually(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--admin-port=off"], "--admin-port off: a replica's state"),
        (["--prot=80"], "--prot=80: no flags of `sluice serve`"),
        (["--max-num-seqs=0"], "--max-num-seqs"),
        ([f"--tls-cert-file={__file__}", f"--tls-key-file={__file__}"], "--tls-cert-file: TLS ends at"),
    ],
)
def test_flags_that_no_child_could_start_with_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        settings_of(flags)

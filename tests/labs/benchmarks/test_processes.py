"""What a benchmark or a test has started ends with it, also where it is killed."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from signal import SIGKILL, SIGTERM
from threading import Thread

import pytest

from backend.bound_process import bound
from labs.benchmarks.processes import ROOT
from tests.gateway.server_process import eventually
from tests.quotas.stores import is_running

STARTER = """
import subprocess, sys, time
from threading import Thread
from backend.bound_process import bound

def start():
    process = subprocess.Popen(**bound(sys.argv[2:]), stdout=subprocess.PIPE, text=True)
    print(process.stdout.readline(), end="", flush=True)

if sys.argv[1] == "in a thread":
    thread = Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
time.sleep(600)
"""
POOL = """
import os, sys, time
from multiprocessing import get_context
from labs.process_pool import process_pool

with process_pool(2, get_context(sys.argv[1])) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""
WHO = {
    "a program": "echo $$; exec sleep 600",
    "what it has started": "sleep 600 & echo $$ $!; wait",
    "what outlives it": "sleep 600 & echo $!",
    "who hears no signal": "trap '' TERM INT HUP; echo $$; while :; do sleep 1; done",
    "who has been stopped": "echo $$; kill -STOP $$",
}


@pytest.mark.parametrize(
    ("where", "number"), [("in a thread", SIGKILL), ("in the main thread", SIGKILL), ("in the main thread", SIGTERM)]
)
@pytest.mark.parametrize("program", WHO.values(), ids=WHO)
def test_nothing_outlives_its_parent_however_that_ends(program: str, where: str, number: int) -> None:
    command = [sys.executable, "-c", STARTER, where, "bash", "-c", program]
    parent = subprocess.Popen(**bound(command), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    started = [int(pid) for pid in parent.stdout.readline().split()]
    assert started and all(map(is_running, started))
    parent.send_signal(number)
    parent.communicate()
    eventually(lambda: not any(map(is_running, started)))


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_a_pool_of_processes_ends_with_a_killed_parent(kind: str) -> None:
    command = bound([sys.executable, "-c", POOL, kind])
    parent = subprocess.Popen(**command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert is_running(worker)
    parent.kill()
    parent.communicate()
    eventually(lambda: not is_running(worker))


def test_a_process_started_by_a_thread_outlives_the_thread() -> None:
    processes = list[subprocess.Popen[str]]()

    def start() -> None:
        command = ["bash", "-c", "read -r line; echo $line"]
        processes.append(subprocess.Popen(**bound(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    thread = Thread(target=start)
    thread.start()
    thread.join()
    (process,) = processes
    assert process.communicate("said\n") == ("said\n", None)


def test_a_command_is_run_as_it_is_given_and_says_how_it_ended(tmp_path: Path) -> None:
    program = "import os, sys; print(sys.argv[1:], os.getcwd(), os.listdir('/proc/self/fd')); sys.exit(3)"
    command = bound([sys.executable, "-c", program, "a b", "", "$(c)", "'"])
    done = subprocess.run(
        check=False, **command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.stdout == f"{['a b', '', '$(c)', chr(39)]} {tmp_path} ['0', '1', '2', '3']\n"
    assert (done.returncode, done.stderr) == (3, "")


STARTERS = {"subprocess.Popen", "subprocess.run", "subprocess.check_output", "subprocess.check_call", "subprocess.call"}
LIFELINES = {  # of other kinds: the end of the parent, the end of what it reads, the server's own lock
    ("labs/process_pool.py", "ProcessPoolExecutor"),
    ("tests/gateway/warm_interpreter.py", "subprocess.Popen"),
    ("tests/gateway/admin/postgres_server.py", "subprocess.Popen"),  # as a user who may not run our interpreter
    ("tests/quotas/embedded/test_embedded_store.py", "subprocess.Popen"),
}
SHORT = ("'git'", "'tar'")


def unbound(folder: str, starters: Set[str]) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        source = path.read_text()
        if not any(starter in source for starter in starters):
            continue  # to parse all takes seconds
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if (starter := ast.unparse(call.func)) not in starters:
                continue
            is_bound = any(keyword.arg is None for keyword in call.keywords)  # **bound(command)
            is_short = call.args and ast.unparse(call.args[0]).lstrip("[").startswith(SHORT)
            if not is_bound and not is_short:
                yield path.relative_to(ROOT).as_posix(), starter


@pytest.mark.parametrize("folder", ["labs", "scripts", "tests"])
def test_every_started_process_is_bound(folder: str) -> None:
    """Tests may run by the name alone what ends by itself."""
    starters = {"ProcessPoolExecutor", "subprocess.Popen"} | (STARTERS if folder != "tests" else set())
    assert set(unbound(folder, starters)) <= LIFELINES

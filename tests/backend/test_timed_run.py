import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backend.bound_process import bound
from backend.timed_run import end_group, run_within

PATIENCE = 120.0
ROOT = Path(__file__).parents[2]
# Starts a process that ignores SIGTERM and holds a lock as long as it lives.
DRIVER = """\
import fcntl, subprocess, sys
child = '''
import fcntl, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
signal.pause()
'''
command = [sys.executable, "-c", child, sys.argv[1]]
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
process.stdout.readline()
print("started", flush=True)
{ending}
"""


def driver(lock: Path, ending: str) -> list[str]:
    return [sys.executable, "-c", DRIVER.format(ending=ending), str(lock)]


def wait_for_release(lock: Path) -> None:
    """Return once nobody holds the lock, which a process does until it has ended."""
    subprocess.run(["flock", lock, "true"], check=True, timeout=PATIENCE)


def test_a_commands_output_and_status_are_returned() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_within(PATIENCE, [sys.executable, "-c", program], check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_within(PATIENCE, [sys.executable, "-c", program])
    assert (error.value.stdout, error.value.stderr) == ("out\n", "err\n")


def test_at_the_limit_what_the_command_has_started_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    communicate = subprocess.Popen.communicate

    def strike(process: "subprocess.Popen[str]", timeout: float) -> None:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", strike)
    with pytest.raises(subprocess.TimeoutExpired):
        run_within(PATIENCE, driver(tmp_path / "lock", "process.wait()"))
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    wait_for_release(tmp_path / "lock")


def test_nothing_outlives_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    run_within(PATIENCE, driver(tmp_path / "lock", "sys.exit()"))
    wait_for_release(tmp_path / "lock")


def test_a_process_told_to_end_leaves_no_command_behind(tmp_path: Path) -> None:
    program = "import sys; from backend.timed_run import *; end_on_signals(); run_within(999.0, sys.argv[1:])"
    command = driver(tmp_path / "lock", "open(sys.argv[2], 'w').close(); process.wait()")
    os.mkfifo(tmp_path / "started")
    process = subprocess.Popen(**bound([sys.executable, "-c", program, *command, tmp_path / "started"]), cwd=ROOT)
    (tmp_path / "started").read_text()
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    wait_for_release(tmp_path / "lock")


def test_a_command_that_is_just_being_started_is_not_left_behind(tmp_path: Path) -> None:
    """A signal may come when the command runs and `Popen` has not returned, above all at the lowest priority."""
    program = """\
import os, signal, subprocess, sys
from backend.timed_run import *
end_on_signals()
start = subprocess.Popen.__init__
def interrupted(process, *arguments, **options):
    start(process, *arguments, **options)
    process.stdout.readline()
    os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen.__init__ = interrupted
run_within(999.0, sys.argv[1:])
"""
    command = driver(tmp_path / "lock", "process.wait()")
    done = subprocess.run(**bound([sys.executable, "-c", program, *command]), cwd=ROOT, check=False, timeout=PATIENCE)
    assert done.returncode == 128 + signal.SIGTERM
    wait_for_release(tmp_path / "lock")


def test_a_group_is_asked_first_and_then_its_last_member_is_ended(tmp_path: Path) -> None:
    asked = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True); signal.pause()"
    process = subprocess.Popen(**bound(driver(tmp_path / "lock", asked)), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    end_group(process, PATIENCE)
    assert process.returncode == 7
    wait_for_release(tmp_path / "lock")
    end_group(process)
    process.stdout.close()


def test_what_a_command_writes_need_not_be_unicode() -> None:
    """A compiler quotes names of files and lines of sources as they are."""
    assert run_within(240.0, ["printf", r"a\377b"]).stdout == "a\ufffdb"

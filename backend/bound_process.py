"""Commands that do not outlive the process that started them."""

import os
import shutil
from collections.abc import Sequence
from typing import Any

BASH = shutil.which("bash") or "bash"  # the command may be given another PATH
LEASH = """
alive=$1; shift
( (read -r _ <&"$alive"; kill -KILL 0) </dev/null >/dev/null 2>&1 & )
exec {alive}<&-
exec "$@"
"""
_alive, _end_of_life = os.pipe()  # has no data while this process lives, the only process that could write to it


def _begin_a_life() -> None:
    global _alive, _end_of_life
    os.close(_alive)
    os.close(_end_of_life)
    _alive, _end_of_life = os.pipe()


os.register_at_fork(after_in_child=_begin_a_life)


def bound(command: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` and `subprocess.run` with which a command does not outlive this process.

    The command leads a process group of its own, in which a shell waits for this process to end, however it ends, and
    then kills the group. PR_SET_PDEATHSIG would kill as soon as the thread ends that started the command.
    """
    return {"args": [BASH, "-c", LEASH, "bash", str(_alive), *command], "process_group": 0, "pass_fds": (_alive,)}

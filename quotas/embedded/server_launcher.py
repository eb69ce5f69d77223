"""Becomes the embedded store's server: `python server_launcher.py PARENT LOCK COMMAND...`

The kernel ends the server with SIGTERM, at which it writes its data out, when the thread that started it ends, however
that happens: prctl(2), PR_SET_PDEATHSIG, which survives execve(2). This is a program because no code may run safely
between fork and exec in a process that has threads. PARENT is that process's id; LOCK a locked file's descriptor, which
the server inherits and never closes, so that the lock is held exactly as long as a server lives.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def launch(parent: int, lock: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the process that wanted a server has ended")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o077)
    os.truncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

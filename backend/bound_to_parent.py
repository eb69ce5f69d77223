"""Runs a module as a child process that is told to stop when its parent dies.

Usage: python -m backend.bound_to_parent PARENT MODULE ARGUMENTS.

The kernel sends the signal, so it comes even if the parent is killed, when the thread ends that started the child.
`sluice serve` then drains: requests whose clients went with the parent end at once, and their use is settled.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # of prctl(2)


def main() -> None:
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:  # else the parent died before the signal was set
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

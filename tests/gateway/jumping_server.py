"""`sluice` on a machine whose calendar jumps a year back at SIGUSR1, and two years forward at SIGUSR2."""

import signal
import sys
import time

from gateway.cli.main import main

YEAR = 365 * 86_400
REAL, REAL_NS = time.time, time.time_ns
offset = 0


def jump(seconds: int) -> None:
    global offset  # noqa: PLW0603
    offset += seconds


if __name__ == "__main__":
    time.time = lambda: REAL() + offset
    time.time_ns = lambda: REAL_NS() + offset * 10**9
    signal.signal(signal.SIGUSR1, lambda *_: jump(-YEAR))
    signal.signal(signal.SIGUSR2, lambda *_: jump(2 * YEAR))
    sys.exit(main())

"""Commands with a time limit, after which they end with all processes that they started, as a compiler's driver
does.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def run_within(
    seconds: float,
    command: Sequence[str | Path],
    *,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process group of its own, of which no process is left when this returns or raises.

    Raises the errors of `subprocess.run`.
    """
    process = None
    try:
        with _deferred_signals:
            process = subprocess.Popen(  # noqa: S603
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",  # a compiler may quote its input
                process_group=0,
            )
        out, err = process.communicate(timeout=seconds)
    finally:
        if process is not None:
            with process:  # which closes its pipes
                end_group(process)
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_on_signals() -> None:
    """Have SIGTERM and SIGHUP end this process by an exception, so that commands of `run_within` end too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: _deferred_signals.end(received))


class _DeferredSignals:
    """While the main thread starts a command, the exceptions of `end_on_signals` wait: one raised within `Popen` would
    leave a running process without a parent that ends it.
    """

    def __init__(self) -> None:
        self._deferring = False
        self._received: int | None = None

    def end(self, received: int) -> None:
        """Exit, now or once the command has started. Called in the main thread, as signal handlers are."""
        if self._deferring:
            self._received = received
        else:
            sys.exit(128 + received)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._deferring = True

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._deferring = False
            if self._received is not None:
                sys.exit(128 + self._received)


_deferred_signals = _DeferredSignals()


def end_group(process: "subprocess.Popen[bytes] | subprocess.Popen[str]", patience: float = 0.0) -> None:
    """End a process, and the group that it leads: by request, if there is patience, and then by force."""
    if patience and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()

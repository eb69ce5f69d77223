"""The process of a rank from 1 on: -m backend.parallel.rank_process FD, where FD is its end of the pipe to rank 0."""

import logging
import os
import signal
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from backend.errors import BackendError
from backend.parallel.loading import load_rank
from backend.parallel.messages import MEET, STOP, Message, RankSetup
from backend.worker.model_runner import LaunchedStep


def main(fd: int) -> int:
    """Follow rank 0 until it says stop, or is gone. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or service manager sends these to every process
        signal.signal(number, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(fd)
    setup: RankSetup = pipe.recv()
    inbox: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, inbox), daemon=True).start()
    torch.set_num_threads(setup.threads)
    launched: deque[LaunchedStep] = deque()
    try:
        runner = load_rank(setup, partial(_wait_for_others, pipe, inbox))
        pipe.send(None)
        while True:
            runner.follow(inbox.get(), launched)
    except BackendError as error:
        with suppress(OSError):
            pipe.send(error)
        return 1


def _wait_for_others(pipe: "Connection[Any, Any]", inbox: "SimpleQueue[Message]") -> None:
    """Tell rank 0 that this part of the model is loaded, and wait until every part is."""
    pipe.send(None)
    assert inbox.get() == MEET


def _receive(pipe: "Connection[Any, Any]", inbox: "SimpleQueue[Message]") -> None:
    """Receive the messages of rank 0. When it is gone the process ends at once, without waiting for the device."""
    try:
        while (message := pipe.recv()) != STOP:
            inbox.put(message)
    except (EOFError, OSError):
        pass
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(int(sys.argv[1])))

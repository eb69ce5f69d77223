"""Pools of processes that do not outlive the process that started them."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import parent_process
from multiprocessing.context import BaseContext
from threading import Thread


def process_pool(jobs: int, context: BaseContext | None = None) -> ProcessPoolExecutor:
    """Make a pool whose processes end with this one, even if it is killed: they would wait for work for ever."""
    return ProcessPoolExecutor(jobs, context, initializer=_end_with_the_parent)


def _end_with_the_parent() -> None:
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()

"""Tasks that run beside the server, for as long as it does."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)


@asynccontextmanager
async def beside(*coroutines: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run coroutines while the block runs; they have ended before it is left, so that their resources can be closed.

    A failing one is logged, as its error would not be reported elsewhere.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(_tell)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task beside the server has ended", exc_info=error)


class Outages:
    """A context that suppresses failures of something that is tried at intervals, and logs the first of each outage."""

    def __init__(self, consequence: str, *failures: type[Exception]) -> None:
        self._consequence, self._failures = consequence, failures
        self._is_away = False

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        was_away, self._is_away = self._is_away, isinstance(error, self._failures)
        if self._is_away and not was_away:
            log.warning("%s: %s", self._consequence, error)
        return self._is_away


LOOK_SECONDS = 0.1  # between looks at the clock


async def wait_awake(seconds: float, *futures: "asyncio.Future[Any]") -> None:
    """Wait until one of the futures is done, for at most `seconds` in which this process ran.

    The time in which it was stopped, or its machine stood still, uses up no patience: what is waited for stood still
    as well.
    """
    loop = asyncio.get_running_loop()
    while seconds > 0 and not any(future.done() for future in futures):
        began, pause = loop.time(), min(seconds, LOOK_SECONDS)
        await asyncio.wait(futures, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        seconds -= min(loop.time() - began, pause)


News = TypeVar("News")


async def tell_all(listeners: Iterable[Callable[[News], Awaitable[object]]], news: News) -> None:
    """Call listeners one after another. Raises the failures in an `ExceptionGroup` after the last one was called."""
    failures = []
    for listener in listeners:
        try:
            await listener(news)
        except Exception as failure:  # noqa: BLE001 - raised below
            failures.append(failure)
    if failures:
        raise ExceptionGroup("listeners failed", failures)


Item = TypeVar("Item")
Made = TypeVar("Made")

ITEMS_PER_TURN = 50  # at a time: some tenths of a millisecond


async def map_in_slices(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """Return `make` of each item, yielding to the event loop after every few. `items` are read at once."""
    taken = list(items)
    made: list[Made] = []
    for start in range(0, len(taken), ITEMS_PER_TURN):
        if start:
            await asyncio.sleep(0)
        made += map(make, taken[start : start + ITEMS_PER_TURN])
    return made

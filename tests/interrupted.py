"""Tasks that wait for an event, and are cancelled in the turn of the event loop in which it comes."""

import asyncio
from collections.abc import Coroutine


async def assert_ends_when_cancelled(waiting: Coroutine[None, None, None], event: asyncio.Event) -> None:
    """Python 3.11's `asyncio.wait_for` drops the cancellation, and what waits so in a loop never ends."""
    task = asyncio.create_task(waiting)
    for _ in range(5):
        await asyncio.sleep(0)
    event.set()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=240)
    assert task.cancelled()

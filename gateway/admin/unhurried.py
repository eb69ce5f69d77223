"""Long lists, made without holding the event loop."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

SLICE = 50  # at a time: some tenths of a millisecond


async def unhurried(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """What `make` makes of each item; other work has its turn after every few. `items` are taken at once."""
    taken = list(items)
    made: list[Made] = []
    for start in range(0, len(taken), SLICE):
        if start:
            await asyncio.sleep(0)
        made += map(make, taken[start : start + SLICE])
    return made

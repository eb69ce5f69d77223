import asyncio

import pytest

from gateway import idle_memory
from gateway.idle_memory import GROWN_BYTES, give_back_when_idle


async def test_the_heap_is_trimmed_once_idle_and_only_where_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(
        [  # whether it is idle, and how large it is then
            (False, 10),
            (True, 10),
            (True, 10),  # trimmed to 3
            (True, 3),
            (True, 3.5),
            (False, 9),
            (True, 9),
            (False, 9),
            (True, 9),
            (True, 9),  # trimmed again, to 4
            (True, 4),
            (True, 4),
        ]
    )
    sizes, trimmed = [10.0], list[float]()
    ended = asyncio.Event()

    def is_idle() -> bool:
        try:
            idle, sizes[0] = next(looks)
        except StopIteration:
            ended.set()
            return False
        return idle

    def trim() -> None:
        trimmed.append(sizes[0])
        sizes[0] = 2.0 + len(trimmed)

    monkeypatch.setattr(idle_memory, "LOOK_SECONDS", 0)
    task = asyncio.create_task(give_back_when_idle(is_idle, trim, lambda: round(sizes[0] * GROWN_BYTES)))
    await ended.wait()
    task.cancel()
    assert trimmed == [10, 9]


def test_memory_of_this_process_is_known_and_its_library_can_trim() -> None:
    assert idle_memory._resident_bytes() > 2**20
    trim = idle_memory._malloc_trim()
    assert trim is None or trim() in (0, 1)

import asyncio

from gateway.admin.unhurried import SLICE, unhurried


async def test_everything_is_made_in_order_and_others_have_their_turn() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert await unhurried(range(10 * SLICE), lambda n: 2 * n) == list(range(0, 20 * SLICE, 2))
    task.cancel()
    assert turns >= 9


async def test_what_comes_while_it_is_made_is_not_in_it() -> None:
    items = list(range(2 * SLICE))

    def make(item: int) -> int:
        items.append(item)
        return item

    assert len(await unhurried(items, make)) == 2 * SLICE


async def test_nothing_makes_nothing() -> None:
    assert await unhurried([], str) == []

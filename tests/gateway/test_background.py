import asyncio

import pytest

from gateway.background import ITEMS_PER_TURN, LOOK_SECONDS, Outages, beside, map_in_slices, tell_all, wait_awake


async def test_everything_is_made_in_order_and_others_have_their_turn() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert await map_in_slices(range(10 * ITEMS_PER_TURN), lambda n: 2 * n) == list(range(0, 20 * ITEMS_PER_TURN, 2))
    task.cancel()
    assert turns >= 9


async def test_items_added_during_a_map_in_slices_are_left_out() -> None:
    items = list(range(2 * ITEMS_PER_TURN))

    def make(item: int) -> int:
        items.append(item)
        return item

    assert len(await map_in_slices(items, make)) == 2 * ITEMS_PER_TURN


async def test_nothing_makes_nothing() -> None:
    assert await map_in_slices([], str) == []


async def test_time_in_which_the_process_stood_still_uses_up_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, stood_still = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + stood_still)
    ended = loop.create_future()
    patient = asyncio.create_task(wait_awake(1000 * LOOK_SECONDS, ended))
    for _ in range(100):
        await asyncio.sleep(0)
        stood_still += 3600.0
    assert not patient.done()
    ended.set_result(None)
    await patient
    impatient = asyncio.create_task(wait_awake(3 * LOOK_SECONDS, loop.create_future()))
    for _ in range(100):
        await asyncio.sleep(0)
        stood_still += 3600.0
    assert impatient.done()


async def test_a_task_beside_a_block_ends_with_the_block() -> None:
    before = asyncio.all_tasks()
    async with beside(asyncio.sleep(3600)):
        assert len(asyncio.all_tasks()) == len(before) + 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_task_that_fails_is_told_and_the_block_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("the reason")

    async with beside(fail()):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "a task beside the server has ended" in caplog.text and "the reason" in caplog.text


async def test_the_failures_of_listeners_keep_none_from_the_others_and_are_raised_together() -> None:
    told: list[str] = []

    async def hear(news: str) -> None:
        told.append(news)

    async def fail(_: str) -> None:
        raise ValueError(len(told))

    with pytest.raises(ExceptionGroup) as raised:
        await tell_all([fail, hear, fail, hear], "news")
    assert told == ["news"] * 2
    assert [failure.args for failure in raised.value.exceptions] == [(0,), (1,)]


def test_each_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    outages = Outages("batches are not looked for", OSError)
    for error in (OSError("gone"), OSError("gone"), None, OSError("gone again")):
        with outages:
            if error is not None:
                raise error
    assert caplog.messages == ["batches are not looked for: gone", "batches are not looked for: gone again"]
    with pytest.raises(ValueError, match="a bug"), outages:
        raise ValueError("a bug")

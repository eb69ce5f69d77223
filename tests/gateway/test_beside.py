import asyncio

import pytest

from gateway.beside import beside


async def test_what_runs_beside_a_block_ends_with_it() -> None:
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

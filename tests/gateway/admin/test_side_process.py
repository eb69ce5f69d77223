"""Processes beside the gateway: their answers, failures and ends; Python's own modules stand in for programs."""

import asyncio

import pytest

from gateway.admin.side_process import SideProcess, SideProcessFailed
from gateway.errors import InternalError, Overloaded

ENDLESS = ("timeit", "-n1", "-r1", "import time; time.sleep(600)")


async def test_a_question_is_answered_and_a_failure_told_in_the_processes_own_words() -> None:
    process = SideProcess("reading")
    assert (await process.answer("json.tool", question=lambda: b"[1]")).split() == [b"[", b"1", b"]"]
    with pytest.raises(SideProcessFailed, match="Expecting value"):
        await process.answer("json.tool", question=lambda: b"[")


async def test_one_runs_at_a_time_and_a_caller_who_leaves_ends_it() -> None:
    process = SideProcess("reading")
    first = asyncio.create_task(process.answer(*ENDLESS))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="Another reading is running"):
        await process.answer("json.tool")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await process.answer("json.tool", question=lambda: b"1") == b"1\n"


async def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(InternalError, match=r"took more than 0\.01 s"):
        await SideProcess("reading", 0.01).answer(*ENDLESS)

import asyncio
from collections import deque
from collections.abc import Callable

import pytest
from starlette.types import Message

from admission.outcome import Outcome
from gateway.errors import RateLimited, ShuttingDown
from gateway.http.request_scope import TRANSPORT, ActiveRequests, RequestScope

SCOPE: dict[str, object] = {"type": "http", "headers": []}


class Peer:
    """The other side of an ASGI application: its messages, and when it leaves."""

    def __init__(self, *messages: Message) -> None:
        self._messages = deque(messages)
        self._gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[Message] = []

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.popleft()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await message.get("gate", self.reads).wait()
        self.sent.append(message)

    def scope(self) -> RequestScope:
        return RequestScope(SCOPE, self.receive, self.send)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def nothing_is_left() -> bool:
    """No other task, and no cancellation that is still to come."""
    await turns(3)
    this = asyncio.current_task()
    assert this is not None
    return asyncio.all_tasks() == {this} and this.cancelling() == 0


async def test_a_block_that_ends_by_itself_has_no_outcome_and_leaves_no_watcher() -> None:
    async with Peer().scope() as scope:
        await turns(2)
    assert scope.outcome is None
    assert await nothing_is_left()


async def test_a_block_that_never_waits_leaves_no_watcher() -> None:
    async with Peer().scope():
        pass
    assert await nothing_is_left()


async def test_an_error_inside_passes_through() -> None:
    with pytest.raises(ValueError, match="inside"):
        async with Peer().scope():
            raise ValueError("inside")
    assert await nothing_is_left()


@pytest.mark.parametrize("turn", range(12))
async def test_a_disconnect_ends_the_block_at_whichever_await_it_is(turn: int) -> None:
    peer, cleaned, reached = Peer(), [], []
    leaver = asyncio.create_task(_after(turn, peer.leave))
    async with peer.scope() as scope:
        try:
            for step in range(20):
                reached.append(step)
                await asyncio.sleep(0)
        finally:
            cleaned.append(True)
    await leaver
    assert scope.outcome is Outcome.DISCONNECTED
    assert cleaned == [True]
    assert len(reached) < 20
    assert await nothing_is_left()


async def test_the_moment_of_an_early_end_is_kept() -> None:
    peer = Peer()
    async with RequestScope(SCOPE, peer.receive, peer.send, lambda: 7.5) as scope:
        assert scope.ended_early is None
        peer.leave()
        await asyncio.Event().wait()
    assert scope.ended_early == 7.5


async def test_messages_before_the_disconnect_are_ignored() -> None:
    peer = Peer({"type": "http.request", "body": b"", "more_body": False})
    async with peer.scope() as scope:
        await turns(5)
        peer.leave()
        await asyncio.Event().wait()
    assert scope.outcome is Outcome.DISCONNECTED


async def test_an_end_after_the_last_await_of_the_block_stays_inside() -> None:
    async with Peer().scope() as scope:
        await turns(1)
        scope.end(Outcome.DISCONNECTED)
    assert scope.outcome is Outcome.DISCONNECTED
    assert await nothing_is_left()


async def test_an_error_raised_while_ending_passes_through() -> None:
    async def main() -> None:
        async with Peer().scope() as scope:
            scope.end(Outcome.DISCONNECTED)
            try:
                await asyncio.sleep(0)
            finally:
                raise ValueError("cleanup")

    with pytest.raises(ValueError, match="cleanup"):
        await main()
    assert await nothing_is_left()


async def test_an_error_raised_before_the_end_arrives_passes_through() -> None:
    async def main() -> None:
        async with Peer().scope() as scope:
            scope.end(Outcome.DISCONNECTED)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await main()
    assert await nothing_is_left()


async def test_a_task_group_inside_ends_with_the_block() -> None:
    peer, ended = Peer(), []

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with peer.scope() as scope, asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(child())
        await turns(2)
        peer.leave()
    assert scope.outcome is Outcome.DISCONNECTED
    assert len(ended) == 3
    assert await nothing_is_left()


async def test_a_cancellation_from_outside_is_not_swallowed() -> None:
    async def main() -> None:
        async with Peer().scope():
            await asyncio.Event().wait()

    task = asyncio.create_task(main())
    await turns(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await nothing_is_left()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("ended_first", [False, True])
async def test_nor_is_a_cancellation_that_comes_together_with_an_end(ended_first: bool, waits: bool) -> None:
    after = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with Peer().scope() as scope:
            if ended_first:
                scope.end(Outcome.DISCONNECTED)
            task.cancel()
            scope.end(Outcome.DISCONNECTED)
            if waits:
                await asyncio.sleep(0)
        after.append(scope.outcome)

    task = asyncio.create_task(main())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert after == []
    assert await nothing_is_left()


async def test_the_first_end_counts() -> None:
    async with Peer().scope() as scope:
        scope.end(Outcome.DISCONNECTED)
        scope.end(Outcome.FAILED)
        scope.fail(ShuttingDown())
        await asyncio.sleep(0)
    assert (scope.outcome, scope.error) == (Outcome.DISCONNECTED, None)
    assert await nothing_is_left()


async def test_a_failure_keeps_what_the_client_is_to_be_told() -> None:
    async with Peer().scope() as scope:
        scope.fail(ShuttingDown())
        await asyncio.Event().wait()
    assert scope.outcome is Outcome.FAILED
    assert isinstance(scope.error, ShuttingDown)


async def test_an_ended_request_cannot_be_ended_again() -> None:
    async with Peer().scope() as scope:
        await turns(2)
    scope.fail(ShuttingDown())
    scope.end(Outcome.DISCONNECTED)
    assert scope.outcome is None and scope.error is None
    assert await nothing_is_left()


async def test_a_refusal_in_the_middle_counts_as_a_refusal() -> None:
    async with Peer().scope() as scope:
        scope.fail(RateLimited("The tokens of this minute are spent."))
        await asyncio.Event().wait()
    assert scope.outcome is Outcome.REFUSED


class Stuck:
    """The exchange of a client that reads nothing."""

    is_paused, aborted = True, False

    def watch(self, callback: Callable[[], object]) -> None:
        pass

    def forget(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


async def test_a_reader_that_stops_is_aborted_by_the_sweep_and_a_slow_one_is_not() -> None:
    active_requests, stuck, slow, exchange = ActiveRequests(write_timeout=0.2), Peer(), Peer(), Stuck()
    sweeper = asyncio.create_task(active_requests.sweep())

    async def serve(scope: RequestScope) -> None:
        async with scope:
            while True:
                await scope.send({"type": "http.response.body"})
                await asyncio.sleep(0)

    scope = {**SCOPE, "extensions": {TRANSPORT: {"exchange": exchange}}}
    stuck.reads.clear()
    lost = active_requests.scope(scope, stuck.receive, stuck.send)
    kept = active_requests.scope(SCOPE, slow.receive, slow.send)
    tasks = [asyncio.create_task(serve(scope)) for scope in (lost, kept)]
    await tasks[0]
    assert lost.outcome is Outcome.DISCONNECTED
    assert exchange.aborted
    assert kept.outcome is None
    kept.end(Outcome.COMPLETED)
    await tasks[1]
    sweeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sweeper
    assert await nothing_is_left()


async def test_a_write_waits_as_long_as_any_of_them_waits() -> None:
    """Of two choices that write side by side, one may be done while the other is stuck."""
    peer = Peer()
    async with peer.scope() as scope:
        assert scope.writing_since is None
        gates = [asyncio.Event(), asyncio.Event()]
        writes = [asyncio.create_task(scope.send({"type": "http.response.body", "gate": gate})) for gate in gates]
        await turns(2)
        assert scope.writing_since is not None
        gates[0].set()
        await writes[0]
        assert scope.writing_since is not None
        gates[1].set()
        await writes[1]
        assert scope.writing_since is None


async def _after(count: int, call: Callable[[], None]) -> None:
    await turns(count)
    call()

import asyncio
from collections.abc import Callable

import pytest

from backend.scheduler.sequence import SPARE_CLASS, FinishReason
from backend.stream import STREAMS_PER_CALLBACK, Delivery, TokenStream
from tests.backend.paper_device import continuation
from tests.backend.scheduler.bench import END
from tests.backend.sequences import make_sequence
from tests.backend.stepped_engine import Bench, running


class Receiver:
    """Takes what is pending, unless it `is_busy`."""

    def __init__(self, stream: TokenStream) -> None:
        self.taken: list[list[int]] = []
        self.is_busy = False
        self._stream = stream

    def __call__(self) -> bool:
        if not self.is_busy:
            self.taken.append(self._stream.rest())
        return not self.is_busy


def new_stream() -> TokenStream:
    return TokenStream(make_sequence("r", "tenant", [5, 6, 7], 100, [END]))


def give(stream: TokenStream, *token_ids: int, reason: FinishReason | None = None) -> None:
    for token_id in token_ids:
        stream.sequence.output.append(token_id)
        stream.put(reason)
    stream.deliver()


async def waiting(stream: TokenStream, receiver: Callable[[], bool]) -> asyncio.Task[list[int]]:
    task = asyncio.create_task(stream.take(receiver))
    await asyncio.sleep(0)
    return task


async def test_a_consumer_that_wants_the_whole_is_woken_for_the_first_and_the_last_token() -> None:
    async with running(Bench()) as bench:
        bench.executor.free()
        with bench.admitted(bench.request(max_tokens=20)) as stream:
            stream.eager = False
            parts = [await stream.take()]
            while stream.finish_reason is None:
                parts.append(await stream.take())
        assert len(parts) <= 2
        assert [token for part in parts for token in part] == continuation([5, 6, 7], 20, END)


async def test_a_receiver_takes_what_comes_while_its_consumer_sleeps_on() -> None:
    stream = new_stream()
    receiver = Receiver(stream)
    task = await waiting(stream, receiver)
    give(stream, 10)
    give(stream, 11, 12)
    stream.deliver()
    assert receiver.taken == [[10], [11, 12]]
    assert not task.done()
    give(stream, 13, reason=FinishReason.LENGTH)
    assert await task == [13], "the end is the consumer's"


async def test_the_consumer_gets_tokens_that_its_receiver_declines_and_the_receiver_the_next() -> None:
    stream = new_stream()
    receiver = Receiver(stream)
    task = await waiting(stream, receiver)
    receiver.is_busy = True
    give(stream, 10)
    receiver.is_busy = False
    give(stream, 11)
    assert await task == [10, 11]
    give(stream, 12)
    assert receiver.taken == [], "the consumer is busy, and looks for itself"
    assert await stream.take(receiver) == [12]
    task = await waiting(stream, receiver)
    give(stream, 13)
    assert receiver.taken == [[13]]
    stream.end(FinishReason.PREEMPTED)
    assert await task == []


async def test_a_receiver_of_a_consumer_that_is_cancelled_is_not_called() -> None:
    stream = new_stream()
    receiver = Receiver(stream)
    task = await waiting(stream, receiver)
    task.cancel()
    give(stream, 10)
    with pytest.raises(asyncio.CancelledError):
        await task
    give(stream, 11)
    assert receiver.taken == []


async def test_an_error_of_a_receiver_reaches_its_consumer_alone() -> None:
    broken, sound = new_stream(), new_stream()
    receiver = Receiver(sound)
    tasks = [await waiting(broken, lambda: 1 // 0 == 0), await waiting(sound, receiver)]
    delivery = Delivery(asyncio.get_running_loop().call_soon)
    for stream in (broken, sound):
        stream.sequence.output.append(10)
        stream.put(None)
        delivery.add(stream)
    delivery.flush()
    with pytest.raises(ZeroDivisionError):
        await tasks[0]
    assert receiver.taken == [[10]]
    sound.end(FinishReason.STOP)
    await tasks[1]


async def test_few_streams_are_delivered_to_in_one_callback_and_all_in_turn() -> None:
    callbacks: list[Callable[[], None]] = []
    delivery, streams = Delivery(callbacks.append), [new_stream() for _ in range(2 * STREAMS_PER_CALLBACK + 1)]
    receivers = [Receiver(stream) for stream in streams]
    tasks = [await waiting(*pair) for pair in zip(streams, receivers, strict=True)]
    for stream in streams:
        stream.sequence.output.append(10)
        stream.put(None)
        delivery.add(stream)
        delivery.flush()
    served = []
    while callbacks:
        (callback,) = callbacks
        callbacks.clear()
        callback()
        served.append(sum(len(receiver.taken) for receiver in receivers))
    assert served == [STREAMS_PER_CALLBACK, 2 * STREAMS_PER_CALLBACK, len(streams)]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_first_token_is_delivered_before_the_tokens_of_streams_that_have_begun() -> None:
    callbacks: list[Callable[[], None]] = []
    delivery, streams = Delivery(callbacks.append), [new_stream() for _ in range(STREAMS_PER_CALLBACK + 2)]
    receivers = [Receiver(stream) for stream in streams]
    tasks = [await waiting(*pair) for pair in zip(streams, receivers, strict=True)]
    *decoding, newcomer = streams
    for round_of in (decoding, streams):
        for stream in round_of:
            stream.sequence.output.append(10)
            stream.put(None)
            delivery.add(stream)
        delivery.flush()
        callbacks.pop(0)()
        if round_of is decoding:
            assert not newcomer.num_taken
            callbacks.pop(0)()
    assert newcomer.num_taken
    assert receivers[0].taken == [[10]]  # its second token waits for the next callback
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_the_spare_class_is_delivered_to_last_and_one_at_a_time() -> None:
    callbacks: list[Callable[[], None]] = []
    delivery, other = Delivery(callbacks.append), new_stream()
    spare = [TokenStream(make_sequence("s", "tenant", [5], 100, [END], priority_class=SPARE_CLASS)) for _ in range(3)]
    receivers = [Receiver(stream) for stream in (*spare, other)]
    tasks = [await waiting(*pair) for pair in zip((*spare, other), receivers, strict=True)]
    for stream in (*spare, other):
        stream.sequence.output.append(10)
        stream.put(None)
        delivery.add(stream)
    delivery.flush()
    served = []
    while callbacks:
        callbacks.pop()()
        served.append([len(receiver.taken) for receiver in receivers])
    assert served == [[0, 0, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_a_stream_is_told_of_no_token_that_nothing_depends_on() -> None:
    stream = new_stream()
    assert stream.due == 0
    stream.eager = False
    assert stream.due == 1
    give(stream, 10)
    assert stream.due > stream.sequence.request.most_tokens
    called: list[int] = []
    stream.call_at(3, lambda: called.append(len(stream.sequence.output)))
    assert stream.due == 3
    give(stream, 11, 12)
    assert called == [3]
    assert stream.due > stream.sequence.request.most_tokens
    assert stream.rest() == [10, 11, 12]

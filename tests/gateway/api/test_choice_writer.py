"""A streamed choice: the same bytes whichever way each of its events is written."""

import asyncio
import re
from itertools import cycle
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message
from uvicorn.protocols.http.flow_control import FlowControl

from backend.scheduler.sequence import FinishReason
from backend.stream import Delivery, TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.tokenizer import Tokenizer
from gateway.api.choice_writer import ChoiceWriter, Progress
from gateway.api.engine_client import Generation
from gateway.api.text_stream import TextStream
from gateway.http.connection_table import ConnectionTable
from gateway.http.request_scope import TRANSPORT, Exchange
from gateway.http.responses import ResponseWriter
from gateway.openai.replies import ChatChunks, Identity
from gateway.sse import last_progress
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from tests.backend import tiny_tokenizers as tiny
from tests.backend.sequences import make_sequence

TOKENIZER = Tokenizer(tiny.byte_level_bpe())
IDS = TOKENIZER.encode_text("the 日 cat 😀 sat\n", add_special_tokens=False)
IDENTITY = Identity("chatcmpl-1", 7, "paper")


class Client:
    """Keeps what is written to it, by ASGI or past it, as one body."""

    def __init__(self, is_ours: bool = True) -> None:
        self.body = b""
        self.past_asgi = 0
        self.flow = FlowControl(cast(asyncio.Transport, self))
        entry = ConnectionTable(1).add("192.0.2.1", lambda: None)
        self.exchange = Exchange(cast(asyncio.WriteTransport, self), self.flow, entry)
        extensions = {TRANSPORT: {"exchange": self.exchange}} if is_ours else {}
        scope = {"type": "http", "headers": [], "extensions": extensions}
        self.response = ResponseWriter(scope, self._send, lambda: 0.0)

    def write(self, chunk: bytes) -> None:
        size, _, data = chunk.partition(b"\r\n")
        assert len(data) == int(size, 16) + 2
        self.body += data.removesuffix(b"\r\n")
        self.past_asgi += 1

    async def _send(self, message: Message) -> None:
        if self.flow.write_paused:
            await self.flow.drain()
        self.body += message.get("body", b"")


class Served:
    """One choice that is written to a client, while the test plays the engine."""

    def __init__(
        self,
        client: Client,
        stop: tuple[str, ...] = (),
        continuous_usage: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.counted = 0
        self._is_stopped = False
        self._tokens = TokenStream(make_sequence("r", "tenant", [5, 6, 7], 100))
        self._delivery = Delivery(asyncio.get_running_loop().call_soon)
        detokenizer = IncrementalDetokenizer(TOKENIZER, stop)
        generation = cast(Generation, SimpleNamespace(stop=self._stop))
        deliveries = cast(DeliveryMetrics, SimpleNamespace(delivered=self._count))
        text = TextStream(self._tokens, detokenizer, generation, deliveries)
        writer = ChoiceWriter(client.response, text, ChatChunks(IDENTITY, False), continuous_usage, progress)
        self.task = asyncio.create_task(writer.write_all())

    def give(self, token_id: int, reason: FinishReason | None = None) -> None:
        if not self._is_stopped:
            self._tokens.sequence.output.append(token_id)
            self._tokens.put(reason)
            self._delivery.add(self._tokens)
            self._delivery.flush()

    def _stop(self, _: TokenStream, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.counted
        self._is_stopped = True

    def _count(self, _sequence: object, before: int, count: int, _last: float) -> float:
        assert before == self.counted
        self.counted += count
        return 0.0


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def body_of(client: Client, actions: list[str], **options: Any) -> bytes:
    served, ids = Served(client, **options), cycle(IDS)
    for action in actions:
        match action:
            case "token":
                served.give(next(ids))
            case "pause":
                client.flow.pause_writing()
            case "resume":
                client.flow.resume_writing()
            case "turns":
                await turns()
    client.flow.resume_writing()
    served.give(next(ids), FinishReason.LENGTH)
    await served.task
    return client.body


@given(actions=st.lists(st.sampled_from(["token", "token", "token", "turns", "pause", "resume"]), max_size=40))
@pytest.mark.parametrize("stop", [(), ("sat",), ("t s", "never")])
async def test_a_body_is_the_same_however_its_client_reads(stop: tuple[str, ...], actions: list[str]) -> None:
    alone = [action for action in actions if action == "token"]
    ways = [(Client(), actions), (Client(is_ours=False), actions), (Client(is_ours=False), alone)]
    ours, others, at_once = [await body_of(client, way, stop=stop) for client, way in ways]
    assert ours == others == at_once


@pytest.mark.parametrize("continuous_usage", [False, True])
async def test_text_after_the_first_is_written_right_where_tokens_are_delivered(continuous_usage: bool) -> None:
    client, other = Client(), Client(is_ours=False)
    served = Served(client, continuous_usage=continuous_usage)
    ids = [token_id for token_id in IDS if TOKENIZER.decode([token_id]).isascii()]
    served.give(ids[0])
    await turns()
    for count, token_id in enumerate(ids[1:], 2):
        served.give(token_id)
        await asyncio.sleep(0)
        assert client.past_asgi == count
    served.give(ids[0], FinishReason.LENGTH)
    await served.task
    assert served.counted == len(ids) + 1
    by_asgi = Served(other, continuous_usage=continuous_usage)
    for token_id in ids:
        by_asgi.give(token_id)
        await turns()
    by_asgi.give(ids[0], FinishReason.LENGTH)
    await by_asgi.task
    assert client.body == other.body


async def test_of_a_whole_answer_the_task_sleeps_until_the_last_token() -> None:
    tokens, delivered = TokenStream(make_sequence("r", "tenant", [5, 6, 7], 100)), list[tuple[int, int]]()
    deliveries = SimpleNamespace(delivered=lambda _, before, count, __: delivered.append((before, count)) or 0.0)
    detokenizer = IncrementalDetokenizer(TOKENIZER, ())
    text = TextStream(tokens, detokenizer, cast(Generation, None), cast(DeliveryMetrics, deliveries))
    task = asyncio.create_task(text.choice())
    await turns()
    for token_id in IDS[:-1]:
        tokens.sequence.output.append(token_id)
        if len(tokens.sequence.output) >= tokens.due and tokens.put(None):
            tokens.deliver()
    assert delivered == [(0, 1)]
    tokens.sequence.output.append(IDS[-1])
    assert tokens.put(FinishReason.LENGTH)
    tokens.deliver()
    assert (await task).text == TOKENIZER.decode(IDS)
    assert delivered == [(0, 1), (1, len(IDS) - 1)]


async def test_nothing_is_written_once_the_writer_is_cancelled_or_the_client_has_left() -> None:
    for end in (lambda served, _: served.task.cancel(), lambda _, client: client.exchange.end()):
        client = Client()
        served = Served(client)
        for token_id in IDS[:2]:
            served.give(token_id)
            await turns()
        written = client.past_asgi
        end(served, client)
        served.give(IDS[2])
        await turns()
        assert client.past_asgi == written
        served.task.cancel()
        await asyncio.wait([served.task])


@given(actions=st.lists(st.sampled_from(["token", "token", "token", "turns", "pause", "resume"]), max_size=40))
async def test_a_router_is_told_after_each_write_how_many_tokens_there_were(actions: list[str]) -> None:
    plain = await body_of(Client(), actions)
    told = await body_of(Client(), actions, progress=Progress())
    said = re.findall(rb": (\d+) tokens\n\n", told)
    assert re.sub(rb": \d+ tokens\n\n", b"", told) == plain
    assert [*map(int, said)] == sorted(map(int, said))
    assert not said or int(said[-1]) <= actions.count("token") + 1


async def test_the_choices_of_an_answer_count_together() -> None:
    client, progress = Client(), Progress()
    choices = [Served(client, progress=progress) for _ in range(2)]
    for _ in range(3):
        for served in choices:
            served.give(IDS[0])
            await turns()
    assert last_progress(bytes(client.body)) == 6
    for served in choices:
        served.give(IDS[0], FinishReason.LENGTH)
        await served.task
    assert last_progress(bytes(client.body)) == 8, "the last of one choice is not the last of the answer"

"""One replica before an ASGI server that is not ours."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
from starlette.types import Message

from fleet.child import ChildFailed, settings_of
from fleet.passthrough import Passthrough
from tests.fleet.paper_fleet import Handler, Parts, answering, never, stream, whole

BODY = b'{"model": "embedded"}'


class Client:
    """Sends one request, a part of its body at a time, and keeps what comes back."""

    def __init__(self, handler: Handler, *flags: str) -> None:
        self.seen: list[httpx.Request] = []
        self.got: list[Message] = []
        self.gone = asyncio.Event()
        self._handler = handler
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._handle))
        replica: Any = SimpleNamespace(client=client, url="http://child", settings=settings_of(flags))
        self.app = Passthrough(replica)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return await self._handler(request)

    async def send(self, *parts: bytes, path: str = "/v1/x") -> "Client":
        left = [*parts]

        async def receive() -> Message:
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.got.append(message)

        headers = [(b"host", b"ray"), (b"x-request-id", b"mine"), (b"authorization", b"Bearer k"), (b"te", b"x")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"a=b"}
        await self.app(scope | {"headers": headers}, receive, send)
        return self

    @property
    def status(self) -> int:
        return int(self.got[0]["status"])

    @property
    def body(self) -> bytes:
        assert not self.got[-1].get("more_body", False)
        return b"".join(message["body"] for message in self.got[1:])


async def test_requests_and_answers_are_handed_on_as_they_are() -> None:
    client = await Client(answering(whole(b'{"a":1}', 429, x_ratelimit="3", date="now", x_request_id="mine"))).send(
        BODY[:5], BODY[5:]
    )
    (request,) = client.seen
    assert (request.method, request.extensions["target"], request.content) == ("POST", b"/v1/x?a=b", BODY)
    assert (request.headers["authorization"], request.headers["x-request-id"]) == ("Bearer k", "mine")
    assert "te" not in request.headers
    assert (client.status, client.body) == (429, b'{"a":1}')
    assert dict(client.got[0]["headers"]) == {b"x-ratelimit": b"3", b"content-length": b"7"}


async def test_a_stream_comes_in_its_parts() -> None:
    client = await Client(answering(stream(b"data: 1\n\n", b"data: 2\n\n"))).send(BODY)
    assert [message.get("body") for message in client.got] == [None, b"data: 1\n\n", b"data: 2\n\n", b""]


async def test_a_client_that_leaves_closes_the_connection_to_the_replica() -> None:
    answer = stream(b"data: 1\n\n", asyncio.Event())
    client = Client(answering(answer))
    sending = asyncio.create_task(client.send(BODY))
    while len(client.got) < 2:
        await asyncio.sleep(0)
    client.gone.set()
    await sending
    assert isinstance(answer.stream, Parts)
    assert answer.stream.is_closed
    assert len(client.got) == 2


class SlowToClose(Parts):
    async def aclose(self) -> None:
        await asyncio.sleep(0)
        await super().aclose()


async def test_a_server_that_cancels_as_well_when_a_client_leaves_does_not_keep_the_connection_open() -> None:
    parts = SlowToClose(b"data: 1\n\n", asyncio.Event())
    client = Client(answering(httpx.Response(200, stream=parts)))
    sending = asyncio.create_task(client.send(BODY))
    while len(client.got) < 2:
        await asyncio.sleep(0)
    for _ in range(8):
        sending.cancel()
        await asyncio.sleep(0)
    while client.app._relaying:
        await asyncio.sleep(0)
    assert parts.is_closed


async def test_a_client_that_leaves_before_the_answer_ends_the_request() -> None:
    client = Client(never)
    sending = asyncio.create_task(client.send(BODY))
    while not client.seen:
        await asyncio.sleep(0)
    client.gone.set()
    await sending
    assert client.got == []


async def test_a_replica_that_is_lost_is_a_typed_error() -> None:
    lost = httpx.ReadError("reset")
    refused = await Client(answering(httpx.ConnectError("refused"))).send(BODY)
    halved = await Client(
        answering(httpx.Response(200, headers={"content-length": "9"}, stream=Parts(b"{", lost)))
    ).send(BODY)
    for client in (refused, halved):
        assert client.status == 503
        assert orjson.loads(client.body)["error"]["code"] == "replica_lost"
        assert dict(client.got[0]["headers"])[b"x-should-retry"] == b"true"
    begun = await Client(answering(stream(b"data: 1\n\n", lost))).send(BODY)
    assert begun.status == 200
    assert b'"code":"replica_lost"' in begun.body
    assert b"[DONE]" not in begun.body
    within = await Client(answering(stream(b"data: 1\n\n", b"data: 2", lost))).send(BODY, path="/v1/messages")
    assert within.body.startswith(b'data: 1\n\nevent: error\ndata: {"type":"error"')
    file = httpx.Response(200, headers={"content-type": "application/octet-stream"}, stream=Parts(b"1", lost))
    assert (await Client(answering(file)).send(BODY)).got[-1]["more_body"], "it is cut"


async def test_a_body_larger_than_the_replicas_limit_is_not_read_to_its_end() -> None:
    client = await Client(never, "--max-body-bytes=1KiB").send(bytes(1025), b"more")
    assert (client.status, orjson.loads(client.body)["error"]["code"]) == (413, "request_too_large")


async def lifespan(start: Callable[[], Awaitable[None]]) -> list[str]:
    """Begin and end one; return what is told of it, and of the replica."""
    told: list[str] = []

    async def stop() -> None:
        told.append("stopped")

    async def send(message: Message) -> None:
        told.append(message.get("message", message["type"]))

    async def receive() -> Message:
        return {"type": "lifespan"}

    replica: Any = SimpleNamespace(start=start, stop=stop)
    await Passthrough(replica)({"type": "lifespan"}, receive, send)
    return told


async def test_the_replica_lives_as_long_as_the_application() -> None:
    async def starts() -> None:
        pass

    async def fails() -> None:
        raise ChildFailed("no such model")

    assert await lifespan(starts) == ["lifespan.startup.complete", "stopped", "lifespan.shutdown.complete"]
    assert await lifespan(fails) == ["no such model"]

"""A router without sockets, before replicas that answer as a test says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx
import orjson
from starlette.types import Message

from fleet.app import RouterApp
from fleet.endpoint import FleetServices
from fleet.fleet import Fleet
from fleet.metrics import RouterMetrics
from fleet.picker import Knowledge, LeastPredicted
from fleet.prefix_map import PrefixMap
from fleet.retries import RetryBudget
from fleet.settlements import PATH, Settlements
from fleet.tracing import RouteTracing
from gateway.api.body_reader import BodyReader
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.http.request_scope import ActiveRequests
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing, demo_record
from gateway.tenants.effective_policy import EffectivePolicies
from quotas.policy.policy import DEFAULT_POLICY
from tests.fleet.states import IDLE, replica

KEY = "sk-sluice-demo-0123456789"
PEPPER = bytes(32)
BODY = {"model": "embedded", "messages": [{"role": "user", "content": "Count."}]}
Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Policies:
    current = DEFAULT_POLICY


class Parts(httpx.AsyncByteStream):
    """The body of an answer: bytes, errors to raise, and events to wait for, one after the other."""

    def __init__(self, *parts: bytes | Exception | asyncio.Event) -> None:
        self._parts = parts
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                yield part

    async def aclose(self) -> None:
        self.is_closed = True


def stream(*parts: bytes | Exception | asyncio.Event) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Parts(*parts))


def whole(body: bytes = b"{}", status: int = 200, **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=given | {"content-length": str(len(body))}, stream=Parts(body))


def refusal(reason: str, status: int = 503) -> httpx.Response:
    return whole(orjson.dumps({"error": {"code": reason}}), status, x_sluice_dropped_reason=reason)


@dataclass
class Answer:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def code(self) -> Any:
        return orjson.loads(self.body)["error"]["code"]

    def header(self, name: bytes) -> bytes | None:
        return dict(self.headers).get(name)


class PaperFleet(httpx.AsyncBaseTransport):
    """Named replicas that have told that they are idle; `handlers` answer for them."""

    def __init__(self, max_body_bytes: int = 10_000, **handlers: Handler) -> None:
        self.handlers = handlers
        self.seen: list[httpx.Request] = []
        self.cut: list[dict[str, Any]] = []  # what is to be settled of lost replicas
        loop = asyncio.get_running_loop()
        knowledge = Knowledge(PrefixMap(), lambda tenant: 1.0)
        self.fleet = Fleet(LeastPredicted(knowledge, Random(1)), knowledge, loop.time)
        self.fleet.set_replicas(map(replica, handlers))
        for number, view in enumerate(self.fleet.views.values()):  # the first one is the best
            self.fleet.told(view, replace(IDLE, step_seconds=float(number)), loop.time())
        telemetry, self.budget = Telemetry(loop.time), RetryBudget()
        self.metrics = RouterMetrics(self.fleet, self.budget)
        telemetry.on_end.append(self.metrics.ended)
        self.services = FleetServices(
            keys=KeyRing(PEPPER, [demo_record(KEY, PEPPER)]),
            policies=EffectivePolicies(Policies()),
            telemetry=telemetry,
            active_requests=ActiveRequests(30.0),
            refusals=RefusalLimiter(1e6, loop.time),
            fleet=self.fleet,
            budget=self.budget,
            client=httpx.AsyncClient(transport=self),
            body_reader=BodyReader(max_body_bytes, 2 * max_body_bytes, 30.0, 1000),
            tracing=RouteTracing(loop.time),
            settlements=Settlements(self.fleet, httpx.AsyncClient(transport=self), "admin"),
        )
        self.metrics.count_settlements(self.services.settlements)
        self.app = RouterApp(self.services, {})

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == PATH:
            self.cut.append(orjson.loads(request.content))
            return whole(b'{"settled":true}')
        self.seen.append(request)
        return await self.handlers[request.url.host](request)

    async def settled(self) -> list[dict[str, Any]]:
        """What the router has had settled once it is done, without the ids."""
        await self.services.settlements.close()
        return [{name: value for name, value in one.items() if name != "request"} for one in self.cut]

    @property
    def asked(self) -> list[str]:
        return [request.url.host for request in self.seen]

    async def request(
        self,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        body: object = BODY,
        key: str | None = KEY,
        headers: Iterable[tuple[bytes, bytes]] = (),
        leave: asyncio.Event | None = None,
        answer: Answer | None = None,
    ) -> Answer:
        """Send a request and return its answer; the client leaves when `leave` is set."""
        answer = answer or Answer()
        given = [(b"authorization", f"Bearer {key}".encode())] if key else []
        messages: list[Message] = [{"type": "http.request", "body": orjson.dumps(body) if method == "POST" else b""}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], message["headers"]
            else:
                answer.parts.append(message["body"])
                answer.is_complete = not message.get("more_body", False)

        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": target,
            "raw_path": target.encode(),
            "client": ("1.2.3.4", 5),
        }
        await self.app(scope | {"query_string": query.encode(), "headers": [*given, *headers]}, receive, send)
        return answer


async def never(request: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


def answering(*answers: httpx.Response | Exception) -> Handler:
    """Give the answers in turn, the last one again and again."""
    left = [*answers]

    async def handler(request: httpx.Request) -> httpx.Response:
        one = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(one, Exception):
            raise one
        return httpx.Response(one.status_code, headers=one.headers.raw, stream=one.stream)

    return handler

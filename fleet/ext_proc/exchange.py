"""One request and its answer as a gateway such as Envoy streams them: in messages, each answered in turn.

With bodies in both directions (`FULL_DUPLEX_STREAMED`, the mode required of endpoint pickers), the gateway keeps no
part of a body: the head of a request is answered once its body is here, the body is handed back in pieces, and so is
that of the answer. In any other mode each message takes a reply, the head's first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, NamedTuple

from starlette.types import Message, Scope

from fleet.ext_proc.messages import KIND, ProcessingResponse
from gateway.http.responses import Headers

MAX_CACHED_CLIENTS = 4096  # parsed addresses
FULL_DUPLEX_STREAMED = 4
OVERWRITE = 2  # append action of a header: replace its value
PIECE_BYTES = 60 * 1024  # of a body: some gateways limit a message to 64 KiB
DESTINATION = "x-gateway-destination-endpoint"
LOAD_BALANCING, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"  # namespaces of metadata
ACKNOWLEDGED = {
    kind: ProcessingResponse(**{kind: {}})
    for kind in (
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    )
}

Read = Callable[[], Awaitable[Any]]  # the next message; None at the end
Write = Callable[[Any], Awaitable[None]]


class AnswerHead(NamedTuple):
    """The head of an answer, of a replica or of the gateway in its place."""

    status: int
    headers: dict[bytes, bytes]
    served: str | None  # the endpoint that answered, if the gateway tells


class GatewayExchange:
    """One request's dialogue with the gateway; `first` is the message of its headers."""

    def __init__(self, first: Any, read: Read, write: Write) -> None:
        self.scope = _scope(first.request_headers.headers.headers)
        self.subset = _subset(first)
        self._read, self._write = read, write
        config = first.protocol_config if first.HasField("protocol_config") else None
        self._is_duplex = config is None or config.request_body_mode == FULL_DUPLEX_STREAMED
        self._is_answer_duplex = config is None or config.response_body_mode == FULL_DUPLEX_STREAMED
        self._is_over = False  # the end of the answer has been seen
        self._tells_answer = config is None or config.response_body_mode != 0
        self._has_body = self._is_duplex and not first.request_headers.end_of_stream
        self._more = True  # the body goes on
        self._has_trailers = self._is_sent_on = False
        self._refusal: Message = {}

    # The request, in the words of ASGI

    async def receive(self) -> Message:
        """The next part of the body, or a disconnect if the client leaves before the last part; blocks behind it."""
        if not self._more:
            await asyncio.get_running_loop().create_future()
        if not self._has_body:
            self._more = False
            return {"type": "http.request"}
        message = await self._read()
        kind = None if message is None else message.WhichOneof(KIND)
        if kind not in {"request_body", "request_trailers"}:
            return {"type": "http.disconnect"}
        self._has_trailers = kind == "request_trailers"
        self._more = not (self._has_trailers or message.request_body.end_of_stream)
        return {"type": "http.request", "body": message.request_body.body, "more_body": self._more}

    async def send(self, message: Message) -> None:
        """Refuse the request, unless it was sent on: then the replica answers."""
        if message["type"] == "http.response.start":
            self._refusal = message
        elif not self._is_sent_on:
            headers = [pair for pair in self._refusal["headers"] if pair[0] != b"content-length"]
            status, mutation = {"code": self._refusal["status"]}, {"set_headers": _options(headers)}
            refusal = {"status": status, "headers": mutation, "body": message["body"]}
            await self._write(ProcessingResponse(immediate_response=refusal))

    async def send_on(self, endpoints: Iterable[str], headers: Headers, body: bytes) -> None:
        """Send the request to the first of the endpoints, falling back on the others, with these headers."""
        self._is_sent_on = True
        destination = ",".join(endpoints)
        given = [(DESTINATION.encode(), destination.encode()), *headers]
        if self._has_body and not self._has_trailers:
            given.append((b"content-length", str(len(body)).encode()))  # the gateway omits it in this mode
        head = {"response": {"header_mutation": {"set_headers": _options(given)}, "clear_route_cache": True}}
        response = ProcessingResponse(request_headers=head)
        metadata = response.dynamic_metadata.fields[LOAD_BALANCING].struct_value
        metadata.fields[DESTINATION].string_value = destination
        await self._write(response)
        if self._has_body:
            await self._hand_back("request_body", body, is_last=not self._has_trailers)
        if self._has_trailers:
            await self._write(ACKNOWLEDGED["request_trailers"])

    # The answer

    async def answer_head(self) -> AnswerHead | None:
        """The head of the answer; None if the gateway ends the exchange without one."""
        while (message := await self._read()) is not None:
            kind = message.WhichOneof(KIND)
            await self._acknowledge(kind, message)
            if kind == "response_headers":
                head = _pairs(message.response_headers.headers.headers)
                status = next((value for name, value in head if name == b":status"), b"")
                served = _metadata(message, LOAD_BALANCING).get(f"{DESTINATION}-served")
                return AnswerHead(
                    int(status) if status.isdigit() else 0, dict(head), served if isinstance(served, str) else None
                )
        return None

    @property
    def is_over(self) -> bool:
        """True once the gateway will send no more of the answer."""
        return self._is_over or not self._tells_answer

    async def answer_rest(self) -> None:
        """Hand the rest of the answer back, to its end or until the gateway ends the exchange."""
        while not self._is_over and (message := await self._read()) is not None:
            await self._acknowledge(message.WhichOneof(KIND), message)

    async def _acknowledge(self, kind: str, message: Any) -> None:
        part = getattr(message, kind)
        if kind == "response_body" and self._is_answer_duplex:
            await self._hand_back(kind, part.body, part.end_of_stream)
        else:
            await self._write(ACKNOWLEDGED[kind])
        if kind.startswith("response"):
            self._is_over = kind == "response_trailers" or part.end_of_stream

    async def _hand_back(self, kind: str, body: bytes, is_last: bool) -> None:
        for start in range(0, max(len(body), 1), PIECE_BYTES):
            piece = {
                "body": body[start : start + PIECE_BYTES],
                "end_of_stream": is_last and start + PIECE_BYTES >= len(body),
            }
            mutation = {"response": {"body_mutation": {"streamed_response": piece}}}
            await self._write(ProcessingResponse(**{kind: mutation}))


def _pairs(headers: Iterable[Any]) -> Headers:
    return [(one.key.encode(), one.raw_value or one.value.encode()) for one in headers]


def _options(headers: Headers) -> list[dict[str, object]]:
    return [
        {"header": {"key": name.decode("latin-1"), "raw_value": value}, "append_action": OVERWRITE}
        for name, value in headers
    ]


def _scope(given: Iterable[Any]) -> Scope:
    """The request's head as an ASGI scope."""
    pairs = _pairs(given)
    pseudo = {name: value.decode("latin-1") for name, value in pairs if name.startswith(b":")}
    headers = [pair for pair in pairs if not pair[0].startswith(b":")]
    path, _, query = pseudo.get(b":path", "").partition("?")
    return {
        "type": "http",
        "method": pseudo.get(b":method", ""),
        "path": path,
        "query_string": query.encode("latin-1"),
        "headers": headers,
        "client": (_client(dict(headers).get(b"x-forwarded-for", b"")), 0),
    }


@lru_cache(MAX_CACHED_CLIENTS)
def _client(forwarded: bytes) -> str:
    """The client's address, as added by the gateway; "" without one."""
    last = forwarded.rpartition(b",")[2].strip().decode("latin-1")
    try:
        return str(ip_address(last))
    except ValueError:
        return ""


def _metadata(message: Any, namespace: str) -> dict[str, Any]:
    for one in message.metadata_context.filter_metadata:
        if one.key == namespace:
            return dict(one.value)
    return {}


def _subset(message: Any) -> Callable[[str], bool] | None:
    """A test for the endpoints that the gateway allows; None if it allows all.

    It names them with their port or without, in a list or in one text between commas.
    """
    hint = _metadata(message, SUBSET_HINT).get(f"{DESTINATION}-subset")
    if hint is None:
        return None
    texts = [hint] if isinstance(hint, str) else hint if isinstance(hint, Iterable) else ()
    allowed = {name.strip() for text in texts if isinstance(text, str) for name in text.split(",")}
    return lambda endpoint: endpoint in allowed or endpoint.rpartition(":")[0] in allowed

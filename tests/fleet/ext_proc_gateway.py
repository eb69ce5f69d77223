"""A gateway on paper: tells a picker of a request in the messages that Envoy sends, and keeps what it is answered."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from fleet.ext_proc.endpoint import PickEndpoint
from fleet.ext_proc.exchange import DESTINATION, FULL_DUPLEX_STREAMED, GatewayExchange
from fleet.ext_proc.messages import KIND, ProcessingRequest
from tests.fleet.paper_fleet import BODY, KEY, PaperFleet

NONE, STREAMED, BUFFERED = 0, 1, 2
PATH = "/v1/chat/completions"
ANSWER = [("x-request-id", "r")]


def header_map(headers: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {"headers": [{"key": name, "raw_value": value.encode()} for name, value in headers]}


def head(
    headers: Iterable[tuple[str, str]] = (),
    *,
    key: str | None = KEY,
    method: str = "POST",
    path: str = PATH,
    end_of_stream: bool = False,
    subset: object = None,
    modes: tuple[int, int] | None = (FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED),
) -> Any:
    pseudo = [(":method", method), (":path", path), (":authority", "models"), (":scheme", "http")]
    given = [*pseudo, ("x-forwarded-for", "9.9.9.9, 1.2.3.4"), *headers]
    given += [("authorization", f"Bearer {key}")] if key else []
    message = ProcessingRequest(request_headers={"headers": header_map(given), "end_of_stream": end_of_stream})
    if subset is not None:
        hint = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        hint.value.update({f"{DESTINATION}-subset": subset})
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return message


def body(*parts: bytes, ends: bool = True) -> list[Any]:
    last = len(parts) - 1
    return [
        ProcessingRequest(request_body={"body": part, "end_of_stream": ends and index == last})
        for index, part in enumerate(parts)
    ]


TRAILERS = ProcessingRequest(request_trailers={"trailers": header_map([("x-trailer", "yes")])})
ANSWER_TRAILERS = ProcessingRequest(response_trailers={"trailers": header_map([("x-trailer", "yes")])})


def answer(
    *parts: bytes, status: int = 200, served: str | None = None, headers: Iterable[tuple[str, str]] = ANSWER
) -> list[Any]:
    """The messages of an answer, the last part of whose body ends it."""
    given = header_map([(":status", str(status)), *headers])
    begun = ProcessingRequest(response_headers={"headers": given, "end_of_stream": not parts})
    if served is not None:
        begun.metadata_context.filter_metadata.add(key="envoy.lb").value.update({f"{DESTINATION}-served": served})
    last = len(parts) - 1
    rest = [
        ProcessingRequest(response_body={"body": part, "end_of_stream": index == last})
        for index, part in enumerate(parts)
    ]
    return [begun, *rest]


WHOLE = orjson.dumps(BODY)
Step = Any  # a message, something to do or to look at, or an event to wait for


class PaperGateway:
    """`told` holds the answers to the messages of the last exchange."""

    def __init__(self, fleet: PaperFleet) -> None:
        self.fleet = fleet
        self.told: list[Any] = []

    async def exchange(self, *steps: Step) -> list[Any]:
        """Take the steps, then end the exchange."""
        left, self.told = [*steps], []

        async def read() -> Any:
            while left:
                step = left.pop(0)
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Callable):
                    step()
                else:
                    return step
            return None

        async def write(message: Any) -> None:
            self.told.append(message)

        exchange = GatewayExchange(await read(), read, write)
        await PickEndpoint(self.fleet.services, exchange)(exchange.scope, exchange.receive, exchange.send)
        return self.told

    @property
    def kinds(self) -> list[str]:
        return [message.WhichOneof(KIND) for message in self.told]

    @property
    def headers(self) -> dict[str, str]:
        """What the first answer sets; nothing is appended to what a client has sent."""
        (told, *_) = [one for one in self.told if one.WhichOneof(KIND) == "request_headers"]
        options = told.request_headers.response.header_mutation.set_headers
        assert {option.append_action for option in options} == {2}
        return {option.header.key: option.header.raw_value.decode() for option in options}

    @property
    def picked(self) -> list[str]:
        """The endpoints in their order, of which header and metadata agree."""
        in_header = self.headers[DESTINATION]
        (told, *_) = [one for one in self.told if one.WhichOneof(KIND) == "request_headers"]
        assert told.dynamic_metadata["envoy.lb"][DESTINATION] == in_header
        assert told.request_headers.response.clear_route_cache
        return in_header.split(",")

    @property
    def refusal(self) -> tuple[int, str, dict[str, str]]:
        """Its status, code and headers; it is the only answer."""
        (told,) = self.told
        assert told.WhichOneof(KIND) == "immediate_response"
        one = told.immediate_response
        headers = {option.header.key: option.header.raw_value.decode() for option in one.headers.set_headers}
        assert headers["content-type"] == "application/json"
        return one.status.code, orjson.loads(one.body)["error"]["code"], headers

    def handed_back(self, kind: str) -> tuple[bytes, list[bool]]:
        """The pieces of a body as one, and which of them says that it is the last."""
        pieces = [
            getattr(one, kind).response.body_mutation.streamed_response
            for one in self.told
            if one.WhichOneof(KIND) == kind
        ]
        return b"".join(piece.body for piece in pieces), [piece.end_of_stream for piece in pieces]

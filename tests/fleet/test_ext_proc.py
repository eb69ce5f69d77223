"""What a gateway tells of a request, and what it is answered; the orders of messages are those of Envoy's tests of its
filter and of the Gateway API inference extension.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import orjson
import pytest

from fleet.ext_proc.exchange import PIECE_BYTES
from fleet.ext_proc.messages import KIND, HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse
from fleet.ext_proc.server import EXT_PROC, HEALTH, NOT_SERVING, SERVING, handlers
from fleet.picker import Picker
from fleet.prediction import RoutedRequest
from fleet.process import Serving
from fleet.view import ReplicaView
from quotas.reservation import Attempt
from tests.fleet.ext_proc_gateway import (
    ANSWER_TRAILERS,
    BUFFERED,
    NONE,
    STREAMED,
    TRAILERS,
    WHOLE,
    PaperGateway,
    answer,
    body,
    head,
)
from tests.fleet.paper_fleet import PaperFleet, never
from tests.fleet.states import IDLE, replica, work

A, B, C = "a:8000", "b:8000", "c:8000"


@pytest.fixture
async def gateway() -> PaperGateway:
    return PaperGateway(PaperFleet(a=never, b=never, c=never))


async def outcomes(gateway: PaperGateway) -> dict[str, int]:
    found = re.findall(rb'sluice_route_requests_total{outcome="(\w+)"} (\d+)', await gateway.fleet.metrics.text())
    return {name.decode(): int(count) for name, count in found}


# The orders of messages -----------------------------------------------------------------------------------------------


async def test_the_head_is_answered_once_the_body_is_here_and_the_body_comes_back_whole(gateway: PaperGateway) -> None:
    def nothing_yet() -> None:
        assert not gateway.told

    await gateway.exchange(head(), nothing_yet, *body(WHOLE[:9], WHOLE[9:9], WHOLE[9:]), *answer(b"{}"))
    assert gateway.kinds == ["request_headers", "request_body", "response_headers", "response_body"]
    assert gateway.picked == [A, B]
    assert gateway.handed_back("request_body") == (WHOLE, [True])
    assert gateway.headers["content-length"] == str(len(WHOLE))
    assert await outcomes(gateway) == {"completed": 1}


async def test_a_stream_comes_back_piece_by_piece(gateway: PaperGateway) -> None:
    await gateway.exchange(head(), *body(WHOLE), *answer(b"data: 1\n\n", b"", b"data: 2\n\n"))
    assert gateway.handed_back("response_body") == (b"data: 1\n\ndata: 2\n\n", [False, False, True])


async def test_trailers_are_answered_last_both_ways(gateway: PaperGateway) -> None:
    begun, part, _ = answer(b"x", b"")
    await gateway.exchange(head(), *body(WHOLE, ends=False), TRAILERS, begun, part, ANSWER_TRAILERS)
    assert gateway.kinds == [
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    ]
    assert gateway.handed_back("request_body") == (WHOLE, [False])
    assert await outcomes(gateway) == {"completed": 1}


async def test_a_request_without_a_body_is_answered_at_its_head(gateway: PaperGateway) -> None:
    await gateway.exchange(head(method="GET", path="/v1/models?x=1", end_of_stream=True), *answer(b"[]"))
    assert gateway.kinds[0] == "request_headers"
    assert "content-length" not in gateway.headers
    assert gateway.picked == [A, B]


async def test_an_empty_body_comes_back_as_its_end(gateway: PaperGateway) -> None:
    await gateway.exchange(head(), *body(b""), *answer(status=400))
    assert gateway.handed_back("request_body") == (b"", [True])
    assert await outcomes(gateway) == {"invalid": 1}


async def test_no_piece_is_larger_than_a_gateway_takes() -> None:
    text = orjson.dumps({"messages": [{"content": "x" * 300_000}]})
    gateway = PaperGateway(PaperFleet(max_body_bytes=2**20, a=never))
    await gateway.exchange(head(), *body(text[:70_000], text[70_000:]), *answer(text))
    for kind in ("request_body", "response_body"):
        whole, ends = gateway.handed_back(kind)
        assert whole == text
        assert ends == [False] * (len(text) // PIECE_BYTES) + [True]


@pytest.mark.parametrize("mode", [NONE, STREAMED, BUFFERED])
async def test_in_other_modes_the_head_is_answered_at_once_and_each_message_by_itself(
    gateway: PaperGateway, mode: int
) -> None:
    def picked() -> None:
        assert gateway.picked

    told = body(WHOLE[:9], WHOLE[9:]) if mode else []
    begun, *rest = answer(b"x", b"y")
    await gateway.exchange(head(modes=(mode, mode)), *told, begun, picked, *(rest if mode else ()))
    assert [one.WhichOneof(KIND) for one in gateway.told[1:]] == [
        *["request_body"] * len(told), "response_headers", *(["response_body"] * 2 if mode else ())
    ]  # fmt: skip
    assert all(not one.ListFields()[0][1].ListFields() for one in gateway.told[1:])
    assert await outcomes(gateway) == {"completed": 1}


async def test_a_gateway_that_names_no_mode_is_taken_to_be_as_the_contract_has_it(gateway: PaperGateway) -> None:
    await gateway.exchange(head(modes=None), *body(WHOLE), *answer(b"x"))
    assert gateway.handed_back("request_body")[0] == WHOLE
    assert gateway.handed_back("response_body")[0] == b"x"


async def test_over_grpc_with_what_it_says_of_its_health() -> None:
    fleet = PaperFleet(a=never)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers(Serving(fleet.services, {}), lambda: fleet.fleet.has_heard))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        process = channel.stream_stream(
            f"/{EXT_PROC}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        told = [one async for one in process(iter([head(), *body(WHOLE), *answer(b"x")]))]
        assert [one.WhichOneof(KIND) for one in told] == [
            "request_headers",
            "request_body",
            "response_headers",
            "response_body",
        ]
        nobody = [one async for one in process(iter([head(subset=["z:1"]), *body(WHOLE)]))]
        assert [one.immediate_response.status.code for one in nobody] == [503]
        garbage = channel.stream_stream(f"/{EXT_PROC}/Process")
        assert [one async for one in garbage(iter([b"\xff\xff"]))] == []
        assert [one async for one in garbage(iter([head().SerializeToString(), b"\xff\xff"]))] == []
        left = process()
        await left.write(head())
        left.cancel()
        check = channel.unary_unary(
            f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )

        async def status(service: str) -> int:
            return (await check(HealthCheckRequest(service=service))).status

        assert [await status(name) for name in ("", "liveness", "readiness", EXT_PROC)] == [SERVING] * 4
        fleet.fleet.has_heard = False
        assert [await status(name) for name in ("liveness", "readiness", EXT_PROC)] == [SERVING, *[NOT_SERVING] * 2]
        with pytest.raises(grpc.aio.AioRpcError, match="known services: , envoy"):
            await status("other")
    await server.stop(None)
    assert not fleet.services.telemetry.live


# Where a request goes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset", "picked"),
    [
        (["c:8000"], [C]),
        (["c:8000", "b:8000"], [B, C]),
        (" b:8000 , , c:8000 ", [B, C]),
        (["b:8000, c:8000"], [B, C]),
        (["b"], [B]),
        (["b:9999", "c"], [C]),
    ],
)
async def test_only_what_a_subset_names_is_picked(gateway: PaperGateway, subset: object, picked: list[str]) -> None:
    await gateway.exchange(head(subset=subset), *body(WHOLE), *answer(b"x"))
    assert gateway.picked == picked


@pytest.mark.parametrize("subset", [[], "", ["192.168.1.1:8080"], [3, None], 3.0])
async def test_an_empty_subset_is_refused(gateway: PaperGateway, subset: object) -> None:
    await gateway.exchange(head(subset=subset), *body(WHOLE))
    status, code, headers = gateway.refusal
    assert (status, code, headers["retry-after"]) == (503, "no_replica", "1")
    assert await outcomes(gateway) == {"refused": 1}


async def test_metadata_that_names_no_subset_allows_all(gateway: PaperGateway) -> None:
    message = head()
    message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint").value.update({"other": "x"})
    await gateway.exchange(message, *body(WHOLE), *answer(b"x"))
    assert gateway.picked == [A, B]


async def test_without_a_replica_that_is_ready_it_is_refused(gateway: PaperGateway) -> None:
    for view in gateway.fleet.fleet.views.values():
        gateway.fleet.fleet.told(view, replace(IDLE, draining=True), gateway.fleet.fleet.clock())
    await gateway.exchange(head(), *body(WHOLE))
    assert gateway.refusal[:2] == (503, "no_replica")


async def test_a_request_that_is_late_everywhere_is_shed() -> None:
    fleet = PaperFleet(a=never)
    busy = replace(IDLE, waiting={"demo": work(30.0, 9)}, seats=1, running=1)
    fleet.fleet.told(fleet.fleet.views[A], busy, fleet.fleet.clock())
    gateway = PaperGateway(fleet)
    await gateway.exchange(head([("x-sluice-ttft-ms", "900")]), *body(WHOLE))
    status, code, headers = gateway.refusal
    assert (status, code, headers["x-sluice-dropped-reason"]) == (429, "deadline_unmeetable", "deadline")
    await gateway.exchange(head([("x-sluice-ttft-ms", "60000")]), *body(WHOLE), *answer(b"x"))
    assert gateway.picked == [A]


async def test_a_request_late_at_the_picked_replica_is_sent_to_the_earliest() -> None:
    fleet = PaperFleet(a=never, b=never)
    gateway, views, now = PaperGateway(fleet), fleet.fleet.views, fleet.fleet.clock()
    for name, seconds in ((A, 1.5), (B, 1.0)):
        fleet.fleet.told(views[name], replace(IDLE, prefill_seconds=seconds), now)
    fleet.fleet.pick = lambda *_, **__: views[A]  # type: ignore[method-assign]
    for patience, picked in ((1700, A), (1200, B)):
        await gateway.exchange(head([("x-sluice-ttft-ms", str(patience))]), *body(WHOLE), *answer(b"x"))
        assert gateway.picked[0] == picked
    await gateway.exchange(head([("x-sluice-ttft-ms", "900")]), *body(WHOLE))
    assert gateway.refusal[:2] == (429, "deadline_unmeetable")


class InTurn(Picker):
    def __init__(self) -> None:
        self._next = 0

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        return views[self._next % len(views)]

    def sent(self, request: RoutedRequest, view: ReplicaView, prefill: float, now: float) -> None:
        self._next += 1


async def test_a_request_counts_once_with_any_other_fields() -> None:
    gateway = PaperGateway(PaperFleet(a=never, b=never, c=never))
    fleet = gateway.fleet.fleet
    fleet._picker = InTurn()
    first = []
    for _ in range(6):
        await gateway.exchange(head(), *body(WHOLE), *answer(b"x"))
        first.append(gateway.picked[0])
    assert first == [A, B, C, A, B, C]


async def test_the_answer_that_a_fallback_gave_is_counted_as_its(gateway: PaperGateway) -> None:
    fleet = gateway.fleet.fleet

    def loads() -> None:
        assert [view.load for view in fleet.views.values()] == [0, 1, 0]

    begun, *rest = answer(b"x", served=B)
    await gateway.exchange(head(), *body(WHOLE), begun, loads, *rest)
    assert gateway.fleet.budget.taken == 1
    assert [view.attempts for view in fleet.views.values()] == [1, 1, 0]
    assert [view.load for view in fleet.views.values()] == [0, 0, 0]


async def test_a_fallback_is_named_as_long_as_the_budget_allows_second_attempts(gateway: PaperGateway) -> None:
    named = []
    for _ in range(15):
        await gateway.exchange(head(), *body(WHOLE), *answer(b"x", served=gateway.picked[-1] if named else B))
        named.append(gateway.picked)
    assert named[0] == [A, B]
    assert [A] in named


async def test_each_attempt_takes_back_what_one_before_it_charged(gateway: PaperGateway) -> None:
    signed = []
    for _ in range(2):
        forged = [("x-sluice-attempt", "forged"), ("x-request-id", "mine")]
        await gateway.exchange(head(forged), *body(WHOLE), *answer(b"x"))
        assert gateway.headers["x-request-id"] == "mine"
        signed.append(gateway.fleet.services.keys.fleet.attempt(gateway.headers["x-sluice-attempt"].encode()))
    first, second = signed
    assert isinstance(first, Attempt)
    assert isinstance(second, Attempt)
    assert first.number > 1
    assert first.request != second.request


async def test_a_replica_that_a_gateway_has_to_answer_for_is_left_out(gateway: PaperGateway) -> None:
    refused = answer(b"x", status=503, headers=[("x-request-id", "r"), ("x-sluice-dropped-reason", "queue_full")])
    for _ in range(3):
        await gateway.exchange(head(), *body(WHOLE), *refused)
        assert gateway.picked[0] == A
    for _ in range(2):
        await gateway.exchange(head(), *body(WHOLE), *answer(b"no healthy upstream", status=503, headers=()))
    await gateway.exchange(head(), *body(WHOLE), *answer(b"x"))
    assert gateway.picked[0] == B


# Attacks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b'{"model": ', b"\xff\xfe", b'{"model": "unknown", "messages": []}', b"[]"])
async def test_a_body_that_is_no_request_is_for_a_replica_to_refuse(gateway: PaperGateway, raw: bytes) -> None:
    await gateway.exchange(head(), *body(raw), *answer(b"{}", status=400))
    assert gateway.handed_back("request_body") == (raw, [True])


@pytest.mark.parametrize("key", [None, "sk-sluice-demo-wrong", "é"])
async def test_without_a_good_key_nothing_is_picked_and_no_body_read(gateway: PaperGateway, key: str | None) -> None:
    def never_read() -> None:
        raise AssertionError

    await gateway.exchange(head(key=key), never_read)
    assert gateway.refusal[:2] == (401, "invalid_api_key")


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_of_64_mb_is_refused_when_it_is_known_to_be_too_large(
    gateway: PaperGateway, announced: bool
) -> None:
    headers, taken = [("content-length", str(2**26))] if announced else [], []
    pieces: list[Any] = []
    for part in body(*[bytes(2**16)] * 4, ends=False):
        pieces += [lambda: taken.append(1), part]
    await gateway.exchange(head(headers), *pieces)
    assert gateway.refusal[:2] == (413, "request_too_large")
    assert len(taken) == (0 if announced else 1)


async def test_an_exchange_that_ends_early_leaves_nothing_behind(gateway: PaperGateway) -> None:
    fleet = gateway.fleet
    await gateway.exchange(head())
    await gateway.exchange(head(), *body(WHOLE, ends=False))
    await gateway.exchange(head(), *body(WHOLE, ends=False), *answer(b"timeout", status=408))
    assert not gateway.told
    await gateway.exchange(head(), *body(WHOLE))
    await gateway.exchange(head(), *body(WHOLE), *answer(b"x", b"y")[:-1])
    waits = asyncio.create_task(gateway.exchange(head(), *body(WHOLE), asyncio.Event()))
    while not any(view.load for view in fleet.fleet.views.values()):
        await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert await outcomes(gateway) == {"disconnected": 6}
    assert not any(view.load for view in fleet.fleet.views.values())
    assert not fleet.services.telemetry.live


async def test_a_replica_that_has_gone_meanwhile_is_no_trouble(gateway: PaperGateway) -> None:
    fleet = gateway.fleet.fleet
    begun, *rest = answer(b"x", served="gone:1")
    await gateway.exchange(head(), *body(WHOLE), lambda: fleet.set_replicas([replica("b")]), begun, *rest)
    assert await outcomes(gateway) == {"completed": 1}


@pytest.mark.parametrize("address", ["", "unknown", "1.2.3.4:80", "fe80::1%eth0", "::1", "\xff"])
async def test_a_refusal_is_sent_for_any_address_that_a_client_claims(gateway: PaperGateway, address: str) -> None:
    await gateway.exchange(head([("x-forwarded-for", address)], key=None))
    assert gateway.refusal[0] == 401


async def test_a_shutdown_refuses_what_has_not_been_picked(gateway: PaperGateway) -> None:
    gateway.fleet.services.active_requests.close()
    await gateway.exchange(head(), *body(WHOLE))
    assert gateway.refusal[:2] == (503, "shutting_down")

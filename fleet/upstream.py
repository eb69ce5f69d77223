"""Speaks HTTP to replicas: sends a request on and hands back the answer as it comes, byte for byte."""

import socket
from collections.abc import Iterable
from itertools import cycle
from ssl import SSLContext

import httpx
from starlette.types import Scope

from gateway.replica.fleet_secret import ATTEMPT_HEADER, PROGRESS_HEADER

CONNECT_SECONDS = 2.0
KEEP_SECONDS = 15.0  # less than a replica keeps an idle connection
NUM_POOLS = 32
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),  # seconds of silence, after which the other host is asked
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),  # times without an answer, by which it is gone
)
"""By these a stream ends whose host has vanished without closing its connections; the kernel asks, not the replica."""
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"host",
        b"content-length",
        b"expect",
    }
)
"""Headers that are not sent on, because they are about one connection."""
MADE_ANEW = HOP_BY_HOP | {b"x-request-id", ATTEMPT_HEADER, PROGRESS_HEADER}

Headers = list[tuple[bytes, bytes]]


def make_client(verify: SSLContext) -> httpx.AsyncClient:
    """Return a client that opens as many connections as there are requests, keeps them, and has no timeout for an
    answer: that is the caller's.
    """
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(transport=Pools(verify), timeout=timeout, trust_env=False)


class Pools(httpx.AsyncBaseTransport):
    """Takes turns between pools of connections, since a pool looks at all that it has for each request."""

    def __init__(self, verify: SSLContext) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_SECONDS)
        self._pools = [
            httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False, socket_options=KEEPALIVE)
            for _ in range(NUM_POOLS)
        ]
        self._next = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._next).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


def forwarded(headers: Iterable[tuple[bytes, bytes]], request_id: bytes, attempt: bytes) -> Headers:
    """Return the headers with which a request is sent on, as an attempt that the router has signed."""
    kept = [(name, value) for name, value in headers if name not in MADE_ANEW]
    return [*kept, (b"x-request-id", request_id), (ATTEMPT_HEADER, attempt), (PROGRESS_HEADER, b"1")]


def answered(response: httpx.Response) -> Headers:
    """Return the headers of the answer to a client, without those that are made anew."""
    own = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"x-request-id", b"date", b"server")
    return [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in own]


async def send_on(
    client: httpx.AsyncClient, scope: Scope, origin: str, headers: Headers, body: bytes
) -> httpx.Response:
    """Send a request on and return the answer once its headers have come. The caller closes it: before its end that
    closes the connection, by which the replica learns that the client left. Raises `httpx.TransportError`.
    """
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    url = httpx.URL(origin).copy_with(raw_path=target)
    return await client.send(httpx.Request(scope["method"], url, headers=headers, content=body), stream=True)

"""Speaks HTTP to replicas: sends a request on and hands back the answer as it comes, byte for byte."""

import socket
from collections.abc import AsyncIterable, Iterable
from itertools import cycle
from ssl import SSLContext

import httpx
from starlette.types import Scope

from gateway.http.connection import DEAD_PEER_SECONDS
from gateway.replica.fleet_secret import ATTEMPT_HEADER, PROGRESS_HEADER

CONNECT_SECONDS = 2.0
KEEP_SECONDS = 15.0  # less than a replica's idle timeout
NUM_POOLS = 32
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),  # seconds of silence before a probe
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    # of unanswered probes, or without an acknowledgement of what was sent, during which the kernel does not probe
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_PEER_SECONDS),
)
"""Socket options that end the stream of a vanished host, and a request to it; the kernel probes the host, not the
replica.
"""
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
"""Headers that are not forwarded, because they concern one connection."""
MADE_ANEW = HOP_BY_HOP | {b"x-request-id", ATTEMPT_HEADER, PROGRESS_HEADER}

Headers = list[tuple[bytes, bytes]]


def make_client(verify: SSLContext) -> httpx.AsyncClient:
    """A client with a connection for each concurrent request, kept alive, and without timeouts for answers: those are
    the caller's.
    """
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(transport=Pools(verify), timeout=timeout, trust_env=False)


class Pools(httpx.AsyncBaseTransport):
    """Rotates among pools of connections, since a pool scans all its connections for each request."""

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
    """The headers of a forwarded request, as an attempt signed by the router."""
    kept = [(name, value) for name, value in headers if name not in MADE_ANEW]
    return [*kept, (b"x-request-id", request_id), (ATTEMPT_HEADER, attempt), (PROGRESS_HEADER, b"1")]


def answered(response: httpx.Response) -> Headers:
    """The headers of the client's answer, without regenerated ones."""
    own = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"x-request-id", b"date", b"server")
    return [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in own]


async def send_on(
    client: httpx.AsyncClient, scope: Scope, origin: str, headers: Headers, body: bytes | AsyncIterable[bytes]
) -> httpx.Response:
    """Send a request on, its target as it came, and return the answer once its headers have come.

    The caller closes it: closed early, the connection is closed too, by which the replica learns that the client left.
    Raises `httpx.TransportError`.
    """
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    if not isinstance(body, bytes):
        headers = headers + [header for header in scope["headers"] if header[0] == b"content-length"]
    as_it_came = {"target": target}  # httpx would resolve `..` in it, and so reach what the router does not route
    request = httpx.Request(scope["method"], origin, headers=headers, content=body, extensions=as_it_came)
    return await client.send(request, stream=True)

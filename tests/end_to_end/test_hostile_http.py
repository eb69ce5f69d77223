"""HTTP as no client should speak it, or as slowly: a typed answer or a closed connection, and no harm to others."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.gateway.raw_client import RawClient, completion, connected, exchange, request
from tests.gateway.server_process import ServerProcess, assert_unharmed, eventually

MEBIBYTE = 2**20


@pytest.fixture(autouse=True, scope="module")
def _unharmed(server: ServerProcess) -> Iterator[None]:
    yield
    assert_unharmed(server)


@pytest.mark.parametrize("header", [b"x: " + b"a" * 100_000, b"\r\n".join(b"x%d: a" % n for n in range(20_000))])
def test_huge_headers_are_431(server: ServerProcess, header: bytes) -> None:
    with connected(server) as client:
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
        reply = client.reply("GET")
        assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
        assert client.is_closed()


def test_a_header_without_end_is_431(server: ServerProcess) -> None:
    assert exchange(server, b"GET /" + b"a" * 100_000, "GET").status == 431


@pytest.mark.parametrize("endless", [b"trailer: x\r\n", b"x"])
def test_endless_trailers_are_cut(server: ServerProcess, endless: bytes) -> None:
    with connected(server) as client:
        client.send(request(server, b"", content_length="", transfer_encoding="chunked"), b"1\r\n{\r\n0\r\n")
        client.send(endless * (200_000 // len(endless)))
        assert client.reply().status in (400, 431)
        assert client.is_closed()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
GARBAGE = {
    "binary": bytes(range(256)) * 16,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/3.7": b"GET / HTTP/3.7\r\n\r\n",
    "smtp": b"EHLO example.com\r\n",
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "bare line feeds": b"GET /v1/models HTTP/1.1\nhost: x\n\n",
    "folded header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n folded\r\n\r\n",
    "space before colon": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length : 2\r\n\r\n{}",
    "nul in header": b"GET /v1/models HTTP/1.1\r\nhost: x\x00y\r\n\r\n",
    "bytes in path": b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "no path": b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n",
    "length and chunks": HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 4\r\ncontent-length: 3\r\n\r\nabcd",
    "equal lengths": HEAD + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "listed lengths": HEAD + b"content-length: 3, 3\r\n\r\nabc",
    "negative length": HEAD + b"content-length: -3\r\n\r\nabc",
    "signed length": HEAD + b"content-length: +3\r\n\r\nabc",
    "huge length": HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
    "chunked not last": HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "nearly chunked": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "tab before chunked": HEAD + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_bytes_that_are_no_http_get_400_and_the_connection_is_closed(server: ServerProcess, garbage: bytes) -> None:
    with connected(server) as client:
        client.send(garbage)
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert reply.error["type"] == "invalid_request_error"
        assert client.is_closed()


@pytest.mark.parametrize("chunk", [b"x\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"2\r\nabcd", b"1\nx"])
def test_broken_chunks_are_400(server: ServerProcess, chunk: bytes) -> None:
    with connected(server) as client:
        client.send(request(server, b"", content_length="", transfer_encoding="chunked"), chunk)
        assert client.reply().error["type"] == "invalid_request_error"
        assert client.is_closed()


def test_a_chunk_that_would_never_end_is_413(server: ServerProcess) -> None:
    with connected(server) as client:
        client.send(request(server, b"", content_length="", transfer_encoding="chunked"), b"ffffffffffff\r\n")
        client.send(b" " * 5 * MEBIBYTE)
        assert client.reply().status == 413


def test_http_1_0_is_answered_and_closed(server: ServerProcess) -> None:
    with connected(server) as client:
        client.send(b"GET /livez HTTP/1.0\r\n\r\n")
        assert client.reply("GET").status == 200
        assert client.is_closed()


def test_a_client_that_expects_100_continue_is_told_to(server: ServerProcess) -> None:
    raw = request(server, completion(), "/v1/completions", expect="100-continue")
    head, body = raw.split(b"\r\n\r\n", 1)
    with connected(server) as client:
        client.send(head + b"\r\n\r\n")
        assert client.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert client.reply().status == 200


def test_a_stranger_that_expects_100_continue_is_refused_at_once(server: ServerProcess) -> None:
    raw = request(server, b"", expect="100-continue", content_length="1000", authorization="")
    assert exchange(server, raw).error["code"] == "invalid_api_key"


def test_an_offer_to_upgrade_is_ignored_and_the_body_still_read(server: ServerProcess) -> None:
    """Java's client offers HTTP/2 with every first request, and sends the body along."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAEAAEAAAAIAAAAB"}
    raw = request(server, completion(), "/v1/completions", **offer)
    with connected(server) as client:
        for _ in range(2):
            client.send(raw)
            assert client.reply().status == 200
        head, body = raw.split(b"\r\n\r\n", 1)
        client.send(head + b"\r\n\r\n")
        client.send(body)
        assert client.reply().status == 200


def test_a_websocket_is_refused_as_the_request_it_is(server: ServerProcess) -> None:
    with connected(server) as client:
        client.send(b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert client.reply("GET").error["code"] == "unknown_url"


def test_requests_one_after_the_other_share_a_connection(server: ServerProcess) -> None:
    with connected(server) as client:
        for _ in range(3):
            client.send(request(server, completion(), "/v1/completions"))
            assert client.reply().status == 200
        client.send(request(server, b"", authorization="Bearer wrong"))
        assert client.reply().status == 401
        client.send(request(server, completion(), "/v1/completions"))
        assert client.reply().status == 200


@pytest.mark.parametrize("smuggled", [b"", b"GET /metrics HTTP/1.1\r\n", b"\x00garbage"])
def test_the_first_of_pipelined_requests_is_answered_and_the_connection_closed(
    server: ServerProcess, smuggled: bytes
) -> None:
    raw = request(server, completion(max_tokens=40, stream=True), "/v1/completions")
    with connected(server) as client:
        client.send(raw + (smuggled or raw))
        reply = client.reply()
        assert reply.status == 200
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert client.is_closed()


def test_line_breaks_after_a_body_do_no_harm(server: ServerProcess) -> None:
    with connected(server) as client:
        for _ in range(2):
            client.send(request(server, completion(), "/v1/completions") + b"\r\n\r\n")
            assert client.reply().status == 200


def test_the_rest_of_a_refused_body_is_not_taken_for_a_request(server: ServerProcess) -> None:
    inner = request(server, completion(), "/v1/completions")
    with connected(server) as client:
        client.send(request(server, b"", authorization="", content_length=str(len(inner))))
        assert client.reply().status == 401
        client.send(inner)
        client.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert json.loads(client.reply("GET").body) == {"status": "ok"}


# slowness and numbers, against a server with small limits


def test_slow_headers_are_answered_and_closed(impatient_server: ServerProcess) -> None:
    with connected(impatient_server) as silent, connected(impatient_server) as slow:
        slow.send(b"GET /livez HTTP/1.1\r\nhost:")
        for client in (silent, slow):
            assert client.reply("GET").error["code"] == "request_timeout"
            assert client.is_closed()


def test_headers_that_trickle_are_late_all_the_same(impatient_server: ServerProcess) -> None:
    with connected(impatient_server) as client:
        _trickle(client, b"GET /livez HTTP/1.1\r\n" + b"x: y\r\n" * 1000)
        assert b"request_timeout" in client.receive()


def test_a_slow_body_is_answered(impatient_server: ServerProcess) -> None:
    with connected(impatient_server) as client:
        client.send(request(impatient_server, b"{", content_length="100"))
        assert client.reply().error["code"] == "request_timeout"


@pytest.mark.parametrize("rest", [b"x", b"\r\n"])
def test_the_rest_of_a_refused_body_is_not_waited_for(impatient_server: ServerProcess, rest: bytes) -> None:
    with connected(impatient_server) as client:
        client.send(request(impatient_server, b"", authorization="", content_length="1000"))
        assert client.reply().status == 401
        client.send(rest)
        assert client.is_closed()


@pytest.mark.parametrize("tickle", [b"", b"\r\n"])
def test_an_idle_connection_is_closed(impatient_server: ServerProcess, tickle: bytes) -> None:
    with connected(impatient_server) as client:
        client.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.reply("GET").status == 200
        client.send(tickle)
        assert client.is_closed()


def test_above_the_limit_the_oldest_strangers_make_room(impatient_server: ServerProcess) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(impatient_server)) for _ in range(40)]
        for client in clients[40 - 24 :]:
            client.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.reply("GET").status == 200
        assert all(client.is_closed() for client in clients[: 40 - 24])
    eventually(impatient_server.answers)


def _trickle(client: RawClient, data: bytes) -> None:
    """Send byte by byte until the server has had enough."""
    for byte in data:
        try:
            client.send(bytes([byte]))
        except OSError:
            return
        time.sleep(0.005)


def test_floods_leave_no_more_memory_behind_the_more_there_are(server: ServerProcess) -> None:
    """Memory of unfinished uploads, refused bodies and unread answers."""

    def resident() -> float:
        return server.metric("process_resident_memory_bytes")

    def flood() -> None:
        with ExitStack() as stack:
            for number in range(120):
                client = stack.enter_context(connected(server))
                whole = request(server, completion(prompt="x" * 200_000, max_tokens=1), "/v1/completions")
                refused = request(server, b"[" + b"0," * 100_000 + b"0]", "/v1/completions")
                streamed = request(server, completion(max_tokens=50, stream=True, ignore_eos=True), "/v1/completions")
                client.send((whole[:-1000], refused, streamed)[number % 3])
        eventually(server.is_idle)

    flood()
    flood()
    before = resident()
    for _ in range(3):
        flood()
    eventually(lambda: resident() < before + 16 * MEBIBYTE)

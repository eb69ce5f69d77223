import select
import socket
import ssl
import subprocess
from pathlib import Path
from shutil import which
from threading import Thread

import httptools
import pytest

from labs.bench.wire import Address, Answer, Connection
from labs.simulation.errors import OptionError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n',
    b": a comment\n\n",
    b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n',
    b'data:{"choices":[{"delta":{"content":"caf\xc3\xa9"}}],"usage":{"prompt_tokens":4}}\n\n',
    b'event: x\ndata: {"choices":[{"text":"s","finish_reason":"stop"}],"usage":null}\n\n',
    b"data: [DONE]\n\n",
)
STREAM = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_an_answer_is_the_same_however_it_is_cut(size: int) -> None:
    answer = Answer()
    parser = httptools.HttpResponseParser(answer)
    for number, start in enumerate(range(0, len(STREAM), size)):
        assert not answer.is_complete
        answer.now = float(number)
        parser.feed_data(STREAM[start : start + size])
    assert ("".join(answer.text), answer.finish, answer.usage) == ("cafés", "stop", {"prompt_tokens": 4})
    assert len(answer.token_times) == 3 and answer.token_times == sorted(answer.token_times)
    assert answer.said_done and answer.is_complete and not answer.error


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"code":"model_failed"}}', "model_failed"),
        (b'{"error":{"code":null,"type":"server_error"}}', "server_error"),
        (b'{"error":"down"}', "down"),
        (b"<html>", "no JSON"),
        (b"[1]", "no JSON object"),
    ],
)
def test_errors_have_a_code_in_a_stream_and_out_of_it(body: bytes, code: str) -> None:
    stream, whole = Answer(), Answer()
    event = b"data: " + body + b"\n\n"
    parser = httptools.HttpResponseParser(stream)
    parser.feed_data(HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
    httptools.HttpResponseParser(whole).feed_data(
        b"HTTP/1.1 500 Oh\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert (stream.error, whole.error) == (code, code)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:x", "http://me:secret@127.0.0.1"]
)
def test_an_impossible_address_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="write http://HOST:PORT"):
        Address.of(url)


def test_an_address_where_nothing_answers_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OptionError, match="nothing answers there"):
        Address.of(f"http://127.0.0.1:{port}")


def test_a_path_stands_before_those_of_requests() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address.of(f"http://localhost:{server.getsockname()[1]}/models/v1/")
    assert address.post("/v1/x", {}, {"a": "b"}).startswith(b"POST /models/v1/x HTTP/1.1\r\nhost: localhost:")


def test_a_connection_speaks_tls(tmp_path: Path) -> None:
    """With TLS a read may leave bytes that no poll sees."""
    openssl = which("openssl")
    if openssl is None:
        pytest.skip("no openssl on PATH")
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    files = ["-out", certificate, "-keyout", key, "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([openssl, "req", *made, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    comments = b"ff\r\n: %b\n\n\r\n" % (b"x" * 251) * 900

    def serve() -> None:
        with context.wrap_socket(listening.accept()[0], server_side=True) as client:
            client.recv(65536)
            client.sendall(STREAM[:-5] + comments + STREAM[-5:])

    with socket.create_server(("127.0.0.1", 0)) as listening, select.epoll() as poll:
        thread = Thread(target=serve)
        thread.start()
        peer = listening.getsockname()
        trusting = ssl.create_default_context(cafile=certificate)
        connection = Connection(Address("localhost", peer[1], "", socket.AF_INET, peer, trusting))
        poll.register(connection.sock.fileno(), connection.waits_for)
        connection.send(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        while not any(connection.handle(events, 0.0) for _, events in poll.poll(60)):
            poll.modify(connection.sock.fileno(), connection.waits_for)
        assert connection.answer is not None and len(connection.answer.token_times) == 3
        connection.close()
        thread.join()

"""Inputs of attackers and broken clients: each gets a typed answer or a closed connection, and harms no other
client.
"""

import gzip
import json
from collections.abc import Iterator

import httpx
import pytest

from tests.gateway.raw_client import chat, completion, connected, exchange, request
from tests.gateway.server_process import ServerProcess, assert_unharmed

MEBIBYTE = 2**20
SECRET = "xylophone-in-a-prompt"  # what no log may hold


@pytest.fixture(autouse=True, scope="module")
def _unharmed(server: ServerProcess) -> Iterator[None]:
    yield
    assert_unharmed(server, SECRET)


def post(server: ServerProcess, body: object, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    """What a body gets; never a 5xx."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = httpx.post(f"{server.url}{path}", content=content, headers={**server.headers, **headers}, timeout=240)
    assert reply.status_code < 500, reply.text
    if reply.status_code != 200:
        assert {"message", "type", "param", "code"} <= reply.json()["error"].keys()
        assert SECRET not in reply.text
    return reply


# bodies

NOT_JSON = {
    "empty": b"",
    "half": b'{"model": "embedded", "messages": [',
    "text": b"hello",
    "form": b"model=embedded&prompt=1",
    "nul": b"\x00",
    "utf-16": '{"model": "embedded"}'.encode("utf-16"),
    "latin-1": b'{"model": "embedded\xff"}',
    "nan": b'{"model": "embedded", "prompt": "1", "temperature": NaN}',
    "infinity": b'{"model": "embedded", "prompt": "1", "temperature": Infinity}',
    "lone surrogate": rb'{"model": "embedded", "prompt": "\ud800"}',
    "deep array": b"[" * 8_000 + b"]" * 8_000,
    "deep object": b'{"a":' * 8_000 + b"1" + b"}" * 8_000,
    "deep inside": b'{"model": "embedded", "prompt": ' + b"[" * 8_000 + b"]" * 8_000 + b"}",
    "array": b"[]",
    "string": b'"model"',
    "number": b"1",
    "null": b"null",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_400(server: ServerProcess, path: str, body: bytes) -> None:
    assert post(server, body, path).status_code == 400


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"\x00" * 100: 1}, "%00" * 64),
        ({"": 1}, "%22%22"),
        ({"messages": [{"role": "user", "content": "Hi", "": 1}]}, "messages[].%22%22"),
        ({"a\r\nset-cookie: b=1": 1, "\u20ac, x": 2}, "a%0D%0Aset-cookie%3A%20b%3D1, %E2%82%AC%2C%20x"),
        ({"x" * 1_000_000: SECRET}, "x" * 64),
    ],
)
def test_a_strange_name_is_ignored_and_told_without_harm(
    server: ServerProcess, fields: dict[str, object], told: str
) -> None:
    body = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}
    reply = post(server, body)
    assert (reply.status_code, reply.headers["x-sluice-ignored"]) == (200, told)
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("text", ["\x00", "\u202e\ufeff", "<|end|><|assistant|>", "\U0001f9ff" * 50, "e\u0301\u0301"])
def test_odd_text_is_answered(server: ServerProcess, text: str) -> None:
    assert post(server, chat(text, max_tokens=4)).status_code == 200


def test_a_compressed_body_is_400_and_said_to_be(server: ServerProcess) -> None:
    body = gzip.compress(json.dumps(chat()).encode())
    error = post(server, body, **{"content-encoding": "gzip"}).json()["error"]
    assert error["param"] == "content-encoding" and "'gzip'" in error["message"]
    assert post(server, chat(max_tokens=1), **{"content-encoding": "identity"}).status_code == 200


# sizes

TOO_MANY = {
    "deep array": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "messages": json.dumps(chat() | {"messages": [{"role": "user", "content": SECRET}] * 5000}).encode(),
    "stops": json.dumps(chat(stop=["s"] * 100_000)).encode(),
    "fields": json.dumps({f"field{n}": 1 for n in range(50_000)}).encode(),
}


@pytest.mark.parametrize("body", TOO_MANY.values(), ids=TOO_MANY.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_body_of_too_many_elements_is_413_and_says_how_many_may_be(
    server: ServerProcess, path: str, body: bytes
) -> None:
    reply = post(server, body, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert "more than 16384 elements" in reply.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_20_megabytes_is_413_while_it_is_sent(server: ServerProcess, chunked: bool) -> None:
    with connected(server) as client:
        length = {"content_length": "", "transfer_encoding": "chunked"}
        client.send(request(server, b"", **(length if chunked else {"content_length": str(20 * MEBIBYTE)})))
        part = b" " * MEBIBYTE
        for _ in range(5 if chunked else 1):
            client.send(b"%x\r\n" % len(part) + part + b"\r\n" if chunked else part)
        reply = client.reply()  # though the rest was never sent
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_a_client_that_sends_all_of_a_too_large_body_gets_its_413(server: ServerProcess) -> None:
    for _ in range(2):
        assert post(server, b" " * 20 * MEBIBYTE).status_code == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_is_to_be_closed_gets_its_413_all_the_same(server: ServerProcess, chunked: bool) -> None:
    """It sends all of its body before it reads, and no part of that is answered with a reset."""
    length = {"content_length": "", "transfer_encoding": "chunked"} if chunked else {}
    body = b" " * 20 * MEBIBYTE
    with connected(server) as client:
        client.send(request(server, b"" if chunked else body, connection="close", **length))
        if chunked:
            client.send(b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n")
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert reply.error["code"] == "request_too_large"
        assert client.is_closed()


def test_a_body_in_one_byte_chunks_is_read(server: ServerProcess) -> None:
    body = json.dumps(completion()).encode()
    with connected(server) as client:
        client.send(request(server, b"", "/v1/completions", content_length="", transfer_encoding="chunked"))
        client.send(b"".join(b"1;ignored=x\r\n%c\r\n" % byte for byte in body), b"0\r\ntrailer: x\r\n\r\n")
        assert client.reply().status == 200


# routes and keys


@pytest.mark.parametrize(
    "path",
    [
        "/", "//", "/v1", "/v1/", "/v1/chat/", "//v1/model", "/v1/../v1/models", "/v1/%2e%2e/metrics",
        "/%00", "/%ff", "/%", "/v1/models%0d%0ax: y", "/metrics/..", "/admin", "/" + "a/" * 5000, "/?" + "q" * 5000,
    ],
)  # fmt: skip
def test_an_unknown_path_is_404(server: ServerProcess, path: str) -> None:
    reply = exchange(server, f"GET {path.replace(' ', '%20')} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), "GET")
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "x:99999999", "\u212a", ""])
def test_a_strange_host_is_nothing_to_us(server: ServerProcess, host: str) -> None:
    with connected(server) as client:
        client.send(b"GET /nowhere HTTP/1.1\r\nhost: " + host.encode() + b"\r\n\r\n")
        assert client.reply("GET").error["code"] == "unknown_url"


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH", "PROPFIND"])
def test_another_method_is_405_and_says_which(server: ServerProcess, method: str) -> None:
    reply = exchange(server, f"{method} /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n".encode(), method)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.error["code"] == "method_not_allowed"


def test_head_is_get_without_a_body(server: ServerProcess) -> None:
    with connected(server) as client:
        for path in ("/livez", "/readyz", "/nowhere"):
            client.send(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            reply = client.reply("HEAD")
            assert reply.status == (404 if path == "/nowhere" else 200)
            assert int(reply.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "authorization",
    [
        "", "Bearer", "Bearer ", "Basic Zm9v", "Bearer a b", "Bearer " + "k" * 10_000, "Bearer sk-sluice-demo-",
        "\xff\xfe", "Bearer sk-sluice-\xe9-x", "bearer\tx", "Bearer null", "Bearer sk-sluice-demo-" + "0" * 40,
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_bad_key_is_401_before_the_body_is_looked_at(server: ServerProcess, path: str, authorization: str) -> None:
    reply = exchange(server, request(server, b"not json", path, authorization=authorization))
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


def test_the_first_of_two_keys_counts(server: ServerProcess) -> None:
    raw = request(server, completion(), "/v1/completions", authorization="Bearer no")
    second = f"\r\nauthorization: Bearer {server.key}\r\n\r\n".encode()
    assert exchange(server, raw.replace(b"\r\n\r\n", second, 1)).status == 401


@pytest.mark.parametrize("value", ["a" * 1000, "a b", "\xe9", "x\ty", "<script>"])
def test_a_harmful_request_id_is_replaced(server: ServerProcess, value: str) -> None:
    with connected(server) as client:
        client.send(request(server, completion(), "/v1/completions", x_request_id=value))
        assert client.reply().headers["x-request-id"].startswith("req_")


def test_a_prompt_is_in_no_answer_and_no_log_of_an_error(server: ServerProcess) -> None:
    for fields in ({"n": 0}, {"model": "other"}, {"functions": [SECRET]}, {"stop": [SECRET] * 65}, {"user": 7}):
        assert post(server, chat(SECRET, **fields)).status_code in (400, 404)

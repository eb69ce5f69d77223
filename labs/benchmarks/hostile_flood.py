"""A client with bad intentions, in a process of its own: `python -m labs.benchmarks.hostile_flood PORT KEY`.

Eight connections, each of which sends the same request as soon as the last is answered; or 64, which ask for the events
of a response in the background and leave them unread. Line by line it is told the kind of request, or null to stop, and
answers how many of each status it got since the line before.
"""

import json
import re
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from threading import Lock, Thread

from labs.benchmarks.load import post

CONNECTIONS = 8
BODY_BYTES = 4 * 2**20 - 1024
CHAT = "/v1/chat/completions"
STREAMS, NUM_STREAMS = "event streams left open", 64


def _filled(head: bytes, item: bytes, tail: bytes) -> bytes:
    return head + item * ((BODY_BYTES - len(head) - len(tail)) // len(item)) + tail


def bodies() -> dict[str, bytes]:
    """Bodies of 4 MiB that are refused, by what is costly about them."""
    messages = b'"messages":[{"role":"user","content":"Hi."}]'
    fields = b",".join(b'"field%d":1' % number for number in range(300_000))
    part = b'{"type":"text","text":""}'
    return {
        "300,000 unknown fields": b'{"model":"embedded",' + messages + b"," + fields + b"}",
        "lists of lists": _filled(b'{"model":"embedded",' + messages + b',"tools":[[]', b",[0]", b"]}"),
        "content parts": _filled(
            b'{"model":"embedded","messages":[{"role":"user","content":[' + part, b"," + part, b"]}]}"
        ),
        "stops": _filled(b'{"model":"embedded",' + messages + b',"stop":["a"', b',"b"', b"]}"),
        "empty objects": _filled(b'{"model":"embedded",' + messages + b',"metadata":{"a":[{}', b",{}", b"]}}"),
        "one text": _filled(b'{"model":"embedded","messages":[{"role":"user","content":"', b"one two ", b'"}]}'),
        "token ids": _filled(b'{"model":"embedded","prompt":[1', b",12", b"]}"),
        "spaces": _filled(b'{"model":"embedded","messages":0', b" ", b"}"),
    }


def requests(key: str) -> dict[str, bytes]:
    """Return the requests by their kind."""
    refused = {kind: _request(CHAT, body, key) for kind, body in bodies().items()}
    bad_key = post(CHAT, {"model": "embedded"}, "sk-sluice-00000000-wrong")
    followed = {"model": "embedded", "input": "Hi", "background": True, "max_output_tokens": 1900, "ignore_eos": True}
    streams = {STREAMS: post("/v1/responses", followed, key)}
    return (
        refused
        | streams
        | {"wrong keys": bad_key, "small bad requests": post(CHAT, {"model": "embedded", "n": 2}, key)}
    )


def _request(path: str, body: bytes, key: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Flood:
    """The requests of eight connections, until told otherwise."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._request: bytes | None = None
        self._lock = Lock()
        self._statuses: Counter[str] = Counter()
        self._threads: list[Thread] = []

    def begin(self, request: bytes, is_followed: bool = False) -> None:
        """`is_followed`: it is sent once, and its response followed by all connections."""
        count = CONNECTIONS
        if is_followed:
            key = re.search(rb"authorization: [^\r]+", request)
            assert key is not None
            name = self._followed(request)
            request = b"GET /v1/responses/%b?stream=true HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (name, key[0])
            count = NUM_STREAMS
        self._request = request
        self._threads = [Thread(target=self._send, args=(request,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _followed(self, request: bytes) -> bytes:
        """The id of a response in the background, once this request is not refused."""
        while True:
            with socket.create_connection(("127.0.0.1", self._port)) as client:
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: client.recv(65_536), b""))
            if found := re.search(rb'"id":"(resp_\w+)"', answer):
                return found[1]
            time.sleep(1)

    def end(self) -> dict[str, int]:
        """Return the count of each status; an answer that is on its way is not waited for."""
        self._request = None
        with self._lock:
            counted, self._statuses = self._statuses, Counter()
        return dict(counted)

    def _send(self, request: bytes) -> None:
        while self._request is request:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as client:
                while self._request is request:
                    self._note(self._ask(client, request))

    def _ask(self, client: socket.socket, request: bytes) -> str:
        client.settimeout(1)
        rest = memoryview(request)
        while rest and self._request is request:
            with suppress(TimeoutError):
                rest = rest[client.send(rest) :]
        answer = b""
        while b"\r\n\r\n" not in answer and self._request is request:
            with suppress(TimeoutError):
                answer += self._received(client)
        head, _, body = answer.partition(b"\r\n\r\n")
        while b"text/event-stream" in head and self._request is request:
            time.sleep(0.1)  # it is left open, and unread
        _, found, length = head.partition(b"content-length: ")
        missing = int(length.partition(b"\r\n")[0]) - len(body) if found else 0
        while missing > 0:
            missing -= len(self._received(client))
        return head[9:12].decode() or "none"

    @staticmethod
    def _received(client: socket.socket) -> bytes:
        data = client.recv(65_536)
        if not data:
            raise ConnectionResetError
        return data

    def _note(self, status: str) -> None:
        with self._lock:
            self._statuses[status] += 1


def main() -> None:
    port, key = sys.argv[1:]
    prepared, flood = requests(key), Flood(int(port))
    print(json.dumps({"kinds": list(prepared)}), flush=True)
    for line in sys.stdin:
        counted = flood.end()
        if (kind := json.loads(line)) is not None:
            flood.begin(prepared[kind], kind == STREAMS)
        print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    main()

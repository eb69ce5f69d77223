"""A server whose timing is known, because it records when it sends each chunk."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import pytest

TEMPLATE_TOKENS, TOKENS_PER_WORD = 7, 2


@dataclass
class Served:
    """One request and what the server did for it; times of `time.perf_counter`."""

    number: int
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    arrived: float
    sent: list[float] = field(default_factory=list)  # before each chunk of the answer
    is_cut: bool = False  # its client left


@dataclass
class Reply:
    """What a script answers: `chunks` tokens, or a status with headers."""

    chunks: int = 3
    pause: float = 0.0  # before each chunk
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    text: str = "word "
    is_whole: bool = True  # False: the stream ends without [DONE]
    is_broken: bool = False  # True: the connection ends behind the usage, in the middle of the response
    finish: str = "stop"
    odd: object = None  # an event that no server should send


class KnownServer(ThreadingHTTPServer):
    """Speaks OpenAI's API; `script` decides the answer to a stream."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: Callable[[Served], Reply] = lambda served: Reply()
        self.served: list[Served] = []
        self.lock = Lock()
        self.charged = 0  # tokens
        self.overcharge = 0  # a request, wrongly
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def streams(self) -> list[Served]:
        return [one for one in self.served if one.body.get("stream")]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client has left


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: KnownServer

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._whole(200, {"data": [{"id": "known", "max_model_len": 4096}]})
        budget = {"resource": "tokens", "per": "month", "amount": 10**9, "remaining": 10**9 - self.server.charged}
        return self._whole(200, {"tenant": "known", "kv_memory": {}, "data": [budget]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            served = Served(len(self.server.streams), self.path, body, dict(self.headers.items()), time.perf_counter())
            self.server.served.append(served)
        prompt = prompt_tokens(body)
        if not body.get("stream"):
            self.server.charged += prompt + 1
            return self._whole(200, {"usage": {"prompt_tokens": prompt, "completion_tokens": 1}, "data": [{}]})
        reply = self.server.script(served)
        if reply.status != 200:
            return self._whole(reply.status, {"error": {"code": "busy", "message": ""}}, reply.headers)
        return self._stream(served, reply, prompt)

    def _stream(self, served: Served, reply: Reply, prompt: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for _ in range(reply.chunks):
                time.sleep(reply.pause)
                served.sent.append(time.perf_counter())
                self._event({"choices": [{"delta": {"content": reply.text}}]})
            if reply.odd is not None:
                self._event(reply.odd)
            self._event({"choices": [{"delta": {}, "finish_reason": reply.finish}]})
            usage = {"prompt_tokens": prompt, "completion_tokens": reply.chunks}
            self._event({"choices": [], "usage": usage})
            with self.server.lock:
                self.server.charged += prompt + reply.chunks + self.server.overcharge
            if reply.is_broken:
                self.close_connection = True
                return
            if reply.is_whole:
                self._chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            served.is_cut = True
            self.close_connection = True

    def _event(self, event: object) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _whole(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def prompt_tokens(body: dict[str, Any]) -> int:
    texts = body.get("input") or [message["content"] for message in body["messages"]]
    return TEMPLATE_TOKENS + TOKENS_PER_WORD * sum(len(text.split()) for text in texts)


@pytest.fixture
def known_server() -> Iterator[KnownServer]:
    server = KnownServer()
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()

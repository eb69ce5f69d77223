"""Clients of a gateway: well-behaved and deaf ones."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.gateway.server_process import ServerProcess

TIMEOUT_SECONDS = 120.0
RECEIVE_BYTES = 4096  # of a slow socket


@dataclass
class Answers:
    """The answers to the clients of one load."""

    first_bytes: list[float] = field(default_factory=list)  # seconds

    @property
    def median(self) -> float:
        ordered = sorted(self.first_bytes)
        return ordered[len(ordered) // 2] if ordered else float("nan")


@contextmanager
def clients(server: ServerProcess, key: str, number: int, **body: Any) -> Iterator[Answers]:
    """Run `number` closed-loop clients until the block is left."""
    answers, stop = Answers(), threading.Event()
    threads = [threading.Thread(target=_ask, args=(server, key, body, answers, stop)) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _ask(server: ServerProcess, key: str, body: dict[str, Any], answers: Answers, stop: threading.Event) -> None:
    with httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT_SECONDS) as client:
        while not stop.is_set():
            began = time.perf_counter()
            with client.stream("POST", f"{server.url}/v1/completions", json=request(**body)) as answer:
                for number, _ in enumerate(answer.iter_raw()):
                    if number == 0 and answer.is_success:
                        answers.first_bytes.append(time.perf_counter() - began)
                    if stop.is_set():
                        return
            if not answer.is_success:
                stop.wait(0.2)


def request(prompt_tokens: int = 8, max_tokens: int = 64, **more: Any) -> dict[str, Any]:
    """A prompt of `prompt_tokens` and an answer of exactly `max_tokens`."""
    return {
        "model": "embedded",
        "prompt": [2 + number % 500 for number in range(prompt_tokens)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


@contextmanager
def deaf_client(server: ServerProcess, key: str, **body: Any) -> Iterator[None]:
    """A client that sends a request, and reads nothing of the answer."""
    content = json.dumps(request(**body)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(head.encode() + content)
        yield

"""The floor a gateway is measured against: starlette on uvicorn with fixed answers, nothing decided, nothing computed.

The answers have the size of the gateway's own, 32 tokens whole or as 35 events. A bare stream is one write an event.
/v1/chat/completions is the same for a proxy, which reads what it is sent: a role, 32 tokens, a finish and the end. Told
how long a step takes, it streams as many tokens as it is asked for, one in each step, all streams on the same clock.
/libraries is what the libraries alone take of a whole answer to a chat: the body parsed and checked, the template
rendered, the prompt encoded, 32 tokens decoded, the answer written.
Answers each line on standard input with what the event loop's thread has done by then.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator
from contextlib import suppress
from threading import Thread, main_thread

import orjson
import uvicorn
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from backend.model.hub import resolve_model
from labs.benchmarks.machine import num_writes

NUM_EVENTS = 35
HEAD = {"id": "chatcmpl-" + "0" * 32, "created": 1_700_000_000, "model": "embedded", "system_fingerprint": None}
IDLE = json.dumps(  # what it says to a router of itself
    {
        "instance": "bare",
        "model": "embedded",
        "draining": False,
        "running": 0,
        "seats": 4096,
        "seat_seconds": 0,
        "step_seconds": 0,
        "prefill_seconds": 0,
        "token_seconds": 1e-6,
        "bytes_per_token": 4,
        "work_seconds": 0,
        "replicas_wanted": 0,
        "kv": {"total": 1, "free": 1, "cached": 0},
        "step": {"coefficients": [0] * 7, "knee": 1, "relative_error": 0},
    }
).encode()
USAGE = {"prompt_tokens": 32, "completion_tokens": 32, "total_tokens": 64, "prompt_tokens_details": None}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=0.0, help="the time between two tokens; 0: none")
    clock = StepClock(parser.parse_args().step_ms / 1000)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = _Server(
        uvicorn.Config(app(clock), loop="uvloop", http="httptools", log_config=None, access_log=False, lifespan="off")
    )
    server.ready = json.dumps({"port": sock.getsockname()[1]})
    Thread(target=_answer_input, daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run(sockets=[sock])


class StepClock:
    """Wakes all waiters every `seconds`, while there are any."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._waiting: list[asyncio.Future[None]] = []

    def step(self) -> asyncio.Future[None]:
        """A future that is done at the end of the next step."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self.seconds, self._tick)
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        return future

    def _tick(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


def app(clock: StepClock) -> Starlette:
    whole, event = _whole_answer(), _event()

    async def answer(_: Request) -> Response:
        return Response(whole, media_type="application/json")

    async def stream(_: Request) -> Response:
        return StreamingResponse(_events(event), media_type="text/event-stream")

    async def chat(request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            return Response(whole, media_type="application/json")
        if clock.seconds:
            return StreamingResponse(
                _paced(completion[False], body["max_tokens"], clock), media_type="text/event-stream"
            )
        with_usage = (body.get("stream_options") or {}).get("include_usage", False)
        return StreamingResponse(_each(completion[with_usage]), media_type="text/event-stream")

    completion = {with_usage: _completion(with_usage) for with_usage in (False, True)}

    async def state(_: Request) -> Response:
        return Response(IDLE, media_type="application/json")

    libraries = Libraries()

    async def with_libraries(request: Request) -> Response:
        return Response(libraries.answer(await request.body()), media_type="application/json")

    paths = {"/whole": answer, "/stream": stream, "/v1/chat/completions": chat, "/libraries": with_libraries}
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in paths.items()]
    return Starlette(routes=[*routes, Route("/admin/v1/state", state)])


class Message(BaseModel):
    """A message of a chat."""

    role: str
    content: str


class Chat(BaseModel):
    """A request, as the benchmarks make it."""

    model: str
    messages: list[Message]
    max_tokens: int
    ignore_eos: bool = False
    stream: bool = False


class Libraries:
    """Answers chats with the libraries alone, and the embedded model's tokenizer and template."""

    def __init__(self) -> None:
        directory = resolve_model("embedded")
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        source = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
        self._told = self._tokenizer.encode(" word" * 32, add_special_tokens=False).ids[:32]

    def answer(self, body: bytes) -> bytes:
        """Returns the whole answer to a chat."""
        chat = Chat.model_validate(orjson.loads(body))
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        prompt = self._template.render(messages=messages, add_generation_prompt=True)
        (encoded,) = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=False)
        message = {"role": "assistant", "content": self._tokenizer.decode(self._told), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        usage = USAGE | {"prompt_tokens": len(encoded)}
        return orjson.dumps({**HEAD, "object": "chat.completion", "choices": [choice], "usage": usage})


async def _events(event: bytes) -> AsyncIterator[bytes]:
    for _ in range(NUM_EVENTS):
        yield event


async def _each(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


async def _paced(events: list[bytes], tokens: int, clock: StepClock) -> AsyncIterator[bytes]:
    yield events[0]
    for _ in range(tokens):
        await clock.step()
        yield events[1]
    yield events[-2]
    yield events[-1]


def _whole_answer() -> bytes:
    message = {"role": "assistant", "content": " word" * 32, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    return json.dumps({**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()


def _completion(with_usage: bool) -> list[bytes]:
    """The events of a stream of 32 tokens."""
    events = [_event({"role": "assistant", "content": ""}), *[_event() for _ in range(32)], _event({}, "length")]
    usage = [_chunk({"choices": [], "usage": USAGE})] if with_usage else []
    return [*events, *usage, b"data: [DONE]\n\n"]


def _event(delta: dict[str, str] | None = None, finish_reason: str | None = None) -> bytes:
    delta = {"content": " word"} if delta is None else delta
    return _chunk({"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]})


def _chunk(fields: dict[str, object]) -> bytes:
    return b"data: " + json.dumps({**HEAD, "object": "chat.completion.chunk", **fields}).encode() + b"\n\n"


def _answer_input() -> None:
    loop = time.pthread_getcpuclockid(main_thread().ident or 0)
    while sys.stdin.readline():
        now = {"at": time.perf_counter(), "loop_cpu": time.clock_gettime(loop), "process_cpu": time.process_time()}
        print(json.dumps({**now, "writes": num_writes(), "steps": 0, "rows": 0}), flush=True)
    os.kill(os.getpid(), signal.SIGINT)


class _Server(uvicorn.Server):
    ready = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.ready, flush=True)


if __name__ == "__main__":
    main()

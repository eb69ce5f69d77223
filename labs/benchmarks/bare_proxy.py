"""The floor that a router is measured against: starlette streaming through httpx to one address, nothing decided."""

import json
import socket
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from threading import Thread

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("origin")
    origin = parser.parse_args().origin
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app(origin), loop="uvloop", http="httptools", log_config=None, access_log=False)
    )
    print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
    Thread(target=_end_with_input, args=(server,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run(sockets=[sock])


def app(origin: str) -> Starlette:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)

    async def proxy(request: Request) -> StreamingResponse:
        headers = [pair for pair in request.headers.raw if pair[0] not in {b"host", b"content-length"}]
        sent = client.build_request("POST", origin + request.url.path, headers=headers, content=await request.body())
        answer = await client.send(sent, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name in {"content-type", "content-length"}}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    @asynccontextmanager
    async def closing(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(routes=[Route("/v1/chat/completions", proxy, methods=["POST"])], lifespan=closing)


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


if __name__ == "__main__":
    main()

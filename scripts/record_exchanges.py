"""Records what a real Envoy tells an endpoint picker of requests, and what it is answered, message by message.

    python -m scripts.record_exchanges

A gateway with the embedded model, `sluice pick`, and Envoy (installed for it), which asks it through a server that
copies all that it passes on. Writes tests/fleet/recorded/envoy.json.gz, which the test beside it replays.
"""

import asyncio
import gzip
import json
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
import yaml

from fleet.ext_proc.server import EXT_PROC
from labs.benchmarks.gateway_process import gateway_process
from labs.benchmarks.processes import background, free_port
from scripts.envoy import ENVOY, envoy
from scripts.fleet_checks import seconds_until

FILE = Path(__file__).parent.parent / "tests" / "fleet" / "recorded" / "envoy.json.gz"
KEY = "sk-sluice-demo-0123456789"
ASK = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}]}
LARGE = ASK | {"messages": [{"role": "user", "content": "word " * 30_000}]}  # bytes: more than a message may have
LONG = ASK | {"stream": True, "ignore_eos": True, "max_tokens": 1900}
END_SECONDS = 5.0  # for Envoy's last messages of an exchange

Exchanges = list[list[tuple[str, str]]]


class Copier:
    """Passes exchanges on to a picker, and keeps all messages with their senders."""

    def __init__(self, picker_port: int) -> None:
        self.exchanges: Exchanges = []
        self._picker = grpc.aio.insecure_channel(f"127.0.0.1:{picker_port}")

    def handler(self) -> Any:
        method = grpc.stream_stream_rpc_method_handler(self._pass)
        return grpc.method_handlers_generic_handler(EXT_PROC, {"Process": method})

    async def _pass(self, asked: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        kept: list[tuple[str, str]] = []
        self.exchanges.append(kept)

        async def copied(messages: AsyncIterator[bytes], who: str) -> AsyncIterator[bytes]:
            async for message in messages:
                kept.append((who, b64encode(message).decode()))
                yield message

        call = self._picker.stream_stream(f"/{EXT_PROC}/Process")(copied(asked, "gateway"))
        async for message in copied(call, "picker"):
            yield message


def main() -> int:
    with TemporaryDirectory(prefix="sluice-envoy-") as directory:
        recorded = asyncio.run(_record(Path(directory)))
    FILE.parent.mkdir(exist_ok=True)
    text = json.dumps({"gateway": ENVOY, "exchanges": recorded})
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    for name, messages in recorded.items():
        print(f"{name}: {len(messages)} messages")
    return 0


async def _record(folder: Path) -> dict[str, list[tuple[str, str]]]:
    ports = {name: free_port() for name in ("envoy", "copier", "picker", "admin")}
    copier = Copier(ports["picker"])
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([copier.handler()])
    server.add_insecure_port(f"127.0.0.1:{ports['copier']}")
    await server.start()
    recorded = {}
    with _running(folder, ports):
        url = f"http://127.0.0.1:{ports['envoy']}"
        is_up = partial(_answers, url)
        await asyncio.to_thread(seconds_until, is_up)
        for name, request in _requests(url).items():
            before = len(copier.exchanges)
            await asyncio.to_thread(_ask, request, leaves=name == "a client that leaves")
            await asyncio.sleep(END_SECONDS)
            (recorded[name],) = copier.exchanges[before:]
    await server.stop(None)
    return recorded


@contextmanager
def _running(folder: Path, ports: dict[str, int]) -> Iterator[None]:
    settings = {"admin_port": ports["admin"], "threads": 1, "http_workers": 0, "calibration": "off", "demo_key": KEY}
    with gateway_process(folder / "state", None, **settings) as gateway:
        replicas = folder / "replicas.yaml"
        at = {"url": f"http://127.0.0.1:{gateway.port}", "admin": f"http://127.0.0.1:{ports['admin']}"}
        replicas.write_text(yaml.safe_dump({"replicas": [at]}))
        picker = [sys.executable, "-m", "sluice", "pick", f"--replicas={replicas}", f"--port={ports['picker']}"]
        picker += ["--admin-port=off", f"--demo-key={KEY}", f"--state-dir={folder / 'state'}", "--log-level=warning"]
        picking = background(picker, folder / "picker.log")
        with picking, envoy(folder, ports["envoy"], ports["copier"], [at["url"]]):
            yield


def _requests(url: str) -> dict[str, httpx.Request]:
    chat, known = f"{url}/v1/chat/completions", {"authorization": f"Bearer {KEY}"}
    pieces = iter([b'{"model": "embedded", "messages": ', json.dumps(ASK["messages"]).encode(), b"}"])
    post = partial(httpx.Request, "POST", chat)
    return {
        "an answer in one piece": post(headers=known, json=ASK),
        "a stream": post(headers=known, json=ASK | {"stream": True}),
        "a body of unknown length": post(headers=known | {"content-type": "application/json"}, content=pieces),
        "a body of many pieces": post(headers=known, json=LARGE),
        "no body": httpx.Request("GET", f"{url}/v1/models", headers=known),
        "a wrong key": post(headers={"authorization": "Bearer sk-wrong"}, json=ASK),
        "a client that leaves": post(headers=known, json=LONG),
    }


def _ask(request: httpx.Request, *, leaves: bool) -> None:
    with httpx.Client(timeout=60) as client:
        response = client.send(request, stream=True)
        parts = response.iter_raw()
        next(parts)
        if not leaves:
            list(parts)
        response.close()


def _answers(url: str) -> bool:
    models = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
    return models.status_code == httpx.codes.OK


if __name__ == "__main__":
    sys.exit(main())

"""The clients of a soak: every manner of request that a gateway meets, at random."""

import asyncio
import json
import os
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.gateway.server_process import ServerProcess

ANSWER_TIMEOUT_SECONDS = 120.0  # until an answer counts as not coming

POLICY = """
classes:
  interactive: {{service_tiers: [priority], ttft: 2s, when_late: refuse}}
  usual: {{aging: 2s}}
  batch: {{service_tiers: [flex], aging: 20s, queue: {{requests: 4}}}}
defaults: {{default_class: usual, price: {{input: 1/1M, output: 2/1M, currency: EUR}}}}
tenants:
  steady: {{weight: {weight}, limits: {{cost: 1000/month, tokens: 500k/session}}, usage: {{by: [user, session]}}}}
  limited: {{limits: {{requests: {{rate: 2/s, burst: 4}}, tokens: 6k/min}}}}
  narrow: {{limits: {{concurrent_requests: 2, kv_bytes: 8MiB, queued_requests: 2}}}}
  spent: {{limits: {{requests: 1/month}}}}
"""
TENANTS = ("steady", "limited", "narrow", "spent")
TIERS = ("auto", "priority", "flex")
ADMIN = (
    *("overview", "tenants", "tenants/steady", "requests", "queue", "kv", "policy", "refusals", "audit", "diagnosis"),
    *("usage", "budgets", "keys", "request-log"),
)

SERVED = {200, 429, 503, 504}  # an answer, or the refusal of a busy gateway
REFUSED = {400, 401, 403, 404, 405, 411, 413, 415, 422, 429, 503}
BROKEN = -1  # in place of a status: the network broke the connection
ENDLESS = -2  # in place of a status: a stream whose connection ended in order, and before it
CUT = 0  # in place of a status: the client left before it


@dataclass
class Visitor:
    """A client at the door of one gateway."""

    server: ServerProcess
    keys: dict[str, str]  # by tenant
    policy: Path
    random: Random
    http: httpx.AsyncClient
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: Counter[tuple[str, int]] = field(default_factory=Counter)

    def a_tenant(self) -> str:
        return self.random.choice(TENANTS)

    def headers(self, tenant: str = "") -> dict[str, str]:
        """The headers of a random tenant by default; some with a trace of their own, some with a deadline."""
        tenant = tenant or self.a_tenant()
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        if self.random.random() < 0.3:
            headers["traceparent"] = f"00-{self.random.randbytes(16).hex()}-{self.random.randbytes(8).hex()}-01"
        if self.random.random() < 0.1:
            headers["x-sluice-ttft-ms"] = str(self.random.choice((50, 500, 5000)))
        return headers

    def words(self) -> str:
        return " ".join(self.random.choices(("count", "red", "from", "3", "to", "12", "please"), k=self._length()))

    def chat(self, **changes: Any) -> dict[str, Any]:
        return {
            "model": "embedded",
            "messages": [{"role": "user", "content": self.words()}],
            "max_tokens": self.random.randint(1, 120),
            "ignore_eos": self.random.random() < 0.5,
            "temperature": self.random.choice((0, 1)),
            "service_tier": self.random.choice(TIERS),
        } | changes

    def _length(self) -> int:
        return self.random.choice((1, 5, 20, 60, 150))

    def note(self, what: str, status: int, expected: Iterable[int]) -> None:
        self.statuses[what, status] += 1
        if status not in expected:
            self.wrong[what, status] += 1


async def whole_answer(visitor: Visitor) -> None:
    url = f"{visitor.server.url}/v1/chat/completions"
    reply = await visitor.http.post(url, json=visitor.chat(), headers=visitor.headers())
    visitor.note("answer", reply.status_code, SERVED)


async def whole_stream(visitor: Visitor) -> None:
    body = visitor.chat(stream=True, stream_options={"include_usage": True})
    async with _streamed(visitor, body) as reply:
        text = await reply.aread()
    ended = reply.status_code != 200 or text.rstrip().endswith(b"data: [DONE]") or b'"error"' in text
    visitor.note("stream", reply.status_code if ended else ENDLESS, SERVED)


async def stream_left_halfway(visitor: Visitor) -> None:
    chunks = visitor.random.randint(1, 30)
    async with _streamed(visitor, visitor.chat(stream=True, max_tokens=400, ignore_eos=True)) as reply:
        async for _ in reply.aiter_raw():
            chunks -= 1
            if chunks == 0:
                break
    visitor.note("left halfway", reply.status_code, SERVED)


def _streamed(visitor: Visitor, body: dict[str, Any]) -> Any:
    return visitor.http.stream(
        "POST", f"{visitor.server.url}/v1/chat/completions", json=body, headers=visitor.headers()
    )


async def cut_anywhere(visitor: Visitor) -> None:
    """Bytes of a request up to some point, a wait, and the end of the connection: in order or by a reset."""
    random, payload = visitor.random, json.dumps(visitor.chat(stream=True, ignore_eos=True)).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: soak", f"content-length: {len(payload)}"]
    lines += [f"{name}: {value}" for name, value in visitor.headers().items()]
    whole = "\r\n".join([*lines, "", ""]).encode() + payload
    _, writer = await asyncio.open_connection("127.0.0.1", visitor.server.port)
    writer.write(whole[: random.choice((len(whole), random.randrange(len(whole) + 1)))])
    await asyncio.sleep(random.choice((0, 0.01, 0.2)))
    if random.random() < 0.5:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    visitor.note("cut", CUT, {CUT})


async def malformed(visitor: Visitor) -> None:
    random = visitor.random
    path = f"{visitor.server.url}/v1/chat/completions"
    body = random.choice(
        (
            b"{",
            b"\xff\xfe\x00",
            os.urandom(200),
            b"[" * 2000,
            b"{" + b",".join(b'"k%d":1' % number for number in range(2000)) + b"}",
            json.dumps(visitor.chat(temperature="hot")).encode(),
            json.dumps(visitor.chat(messages=[])).encode(),
            json.dumps(visitor.chat(model="another")).encode(),
            json.dumps(visitor.chat(stop=["x" * 9000])).encode(),
            json.dumps(visitor.chat(messages=[{"role": "user", "content": "far too long " * 4000}])).encode(),
        )
    )
    reply = await visitor.http.post(path, content=body, headers=visitor.headers("steady"))
    visitor.note("malformed", reply.status_code, REFUSED)


async def too_large(visitor: Visitor) -> None:
    """A body beyond the limit, from a client that has to notice the refusal while it still sends."""
    try:
        url = f"{visitor.server.url}/v1/completions"
        reply = await visitor.http.post(url, content=b" " * (5 << 20), headers=visitor.headers())
        visitor.note("too large", reply.status_code, REFUSED)
    except (httpx.WriteError, httpx.ReadError):
        visitor.note("too large", CUT, {CUT})


async def stranger(visitor: Visitor) -> None:
    headers = {
        "authorization": f"Bearer sk-sluice-{visitor.random.randbytes(4).hex()}-{visitor.random.randbytes(20).hex()}"
    }
    reply = await visitor.http.post(f"{visitor.server.url}/v1/completions", json=visitor.chat(), headers=headers)
    visitor.note("stranger", reply.status_code, {401, 429})


async def question(visitor: Visitor) -> None:
    path = visitor.random.choice(("/v1/models", "/v1/limits", "/livez", "/readyz", "/nowhere"))
    reply = await visitor.http.get(visitor.server.url + path, headers=visitor.headers())
    visitor.note("question", reply.status_code, {200, 404, 429})


async def tokenize(visitor: Visitor) -> None:
    body = {"model": "embedded", "prompt": "3, 4, 5 " * visitor.random.randint(1, 200)}
    reply = await visitor.http.post(f"{visitor.server.url}/tokenize", json=body, headers=visitor.headers())
    visitor.note("tokenize", reply.status_code, {200, 429})


async def admin(visitor: Visitor) -> None:
    """An admin looks at everything, and ends a request now and then."""
    headers, url = visitor.server.admin_headers, visitor.server.admin_url
    path = visitor.random.choice((*(f"/admin/v1/{part}" for part in ADMIN), "/metrics", "/admin/v1/nothing"))
    reply = await visitor.http.get(url + path, headers=headers)
    visitor.note("admin", reply.status_code, {200, 404})
    if path.endswith("/requests") and visitor.random.random() < 0.3:
        for row in reply.json()["live"][:1]:
            reply = await visitor.http.post(f"{url}/admin/v1/requests/{row['id']}/cancel", headers=headers)
            visitor.note("cancel", reply.status_code, {200, 400, 404, 409})  # 400: its body is still being read


async def edit_policy(visitor: Visitor) -> None:
    """An edit of the policy, valid or not."""
    text = POLICY.format(weight=visitor.random.choice((1, 2, 3, "heavy")))
    fresh = visitor.policy.with_suffix(f".{visitor.random.randbytes(4).hex()}")
    fresh.write_text(text)
    fresh.replace(visitor.policy)
    reply = await visitor.http.post(
        f"{visitor.server.admin_url}/admin/v1/policy/reload", headers=visitor.server.admin_headers
    )
    visitor.note("policy edit", reply.status_code, {200, 400, 409, 422})


Manner = Callable[[Visitor], Awaitable[None]]

CHATS: dict[Manner, float] = {  # by how often, in parts of a hundred
    whole_stream: 25,
    whole_answer: 20,
    stream_left_halfway: 12,
    cut_anywhere: 10,
    malformed: 10,
    question: 8,
    tokenize: 4,
    stranger: 4,
    admin: 4,
    too_large: 2,
    edit_policy: 1,
}

"""The clients of a soak beside those of chats: stored responses, conversations, messages, grammars, batches, keys."""

import asyncio
import json
from typing import Any

from scripts.soak_load import SERVED, Manner, Visitor

MAX_BATCH_LINES = 6
BATCH_POLLS, POLL_SECONDS = 20, 0.25  # so that a gate that closes waits five seconds for a batch

COLOURS = ("red", "green", "blue", "grey", "brown", "black", "white")


async def _post(visitor: Visitor, path: str, body: Any, tenant: str, **headers: str) -> tuple[int, Any]:
    return await _ask(visitor, "POST", path, tenant, headers, json=body)


async def _ask(visitor: Visitor, method: str, path: str, tenant: str, headers: Any, **options: Any) -> tuple[int, Any]:
    sent = visitor.headers(tenant) | dict(headers)
    reply = await visitor.http.request(method, f"{visitor.server.url}/v1/{path}", headers=sent, **options)
    return reply.status_code, reply.json() if "json" in reply.headers.get("content-type", "") else reply.text


async def response(visitor: Visitor) -> None:
    """A response, perhaps in the background or streamed, and what is done with it afterwards."""
    random, tenant = visitor.random, visitor.a_tenant()
    body = {
        "model": "embedded",
        "input": visitor.words(),
        "max_output_tokens": random.randint(1, 60),
        "stream": random.random() < 0.3,
        "background": random.random() < 0.3,
        "metadata": {"run": str(random.randrange(5))},
    }
    status, reply = await _post(visitor, "responses", body, tenant)
    visitor.note("response", status, SERVED)
    if status != 200 or body["stream"]:
        return
    one = f"responses/{reply['id']}"
    if body["background"] and random.random() < 0.4:
        visitor.note("response cancelled", (await _post(visitor, f"{one}/cancel", {}, tenant))[0], SERVED)
    elif not body["background"] and random.random() < 0.5:
        following = body | {"previous_response_id": reply["id"], "stream": False}
        visitor.note("response goes on", (await _post(visitor, "responses", following, tenant))[0], SERVED)
    method = random.choice(("GET", "DELETE"))
    expected = SERVED | ({400, 409} if body["background"] and method == "DELETE" else set())
    visitor.note(f"response {method}", (await _ask(visitor, method, one, tenant, {}))[0], expected)


async def conversation(visitor: Visitor) -> None:
    """A conversation with a turn in it, which is deleted."""
    tenant = visitor.a_tenant()
    items = [{"type": "message", "role": "user", "content": visitor.words()}]
    status, reply = await _post(visitor, "conversations", {"items": items}, tenant)
    visitor.note("conversation", status, SERVED)
    if status != 200:
        return
    body = {"model": "embedded", "input": "And now?", "max_output_tokens": 20, "conversation": reply["id"]}
    visitor.note("conversation's turn", (await _post(visitor, "responses", body, tenant))[0], SERVED)
    one = f"conversations/{reply['id']}"
    visitor.note("conversation's items", (await _ask(visitor, "GET", f"{one}/items", tenant, {}))[0], SERVED)
    visitor.note("conversation DELETE", (await _ask(visitor, "DELETE", one, tenant, {}))[0], SERVED)


async def message(visitor: Visitor) -> None:
    """Anthropic's shape, of a session of its own."""
    random = visitor.random
    body = {
        "model": "embedded",
        "max_tokens": random.randint(1, 60),
        "messages": [{"role": "user", "content": visitor.words()}],
        "stream": random.random() < 0.5,
    }
    session = {"x-sluice-session": random.randbytes(6).hex()}
    status, _ = await _post(visitor, "messages", body, visitor.a_tenant(), **session)
    visitor.note("message", status, SERVED | {529})


async def structured(visitor: Visitor) -> None:
    """An answer by a schema that nobody else sends, or a call of a tool."""
    random = visitor.random
    names = [f"{random.choice(COLOURS)}_{random.randrange(1000)}" for _ in range(random.randint(1, 5))]
    schema = {
        "type": "object",
        "properties": {name: {"enum": [random.randrange(99), "a", None]} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    more = random.choice(({"response_format": form}, {"tools": tools, "tool_choice": "required"}))
    body = visitor.chat(max_tokens=200, ignore_eos=False, **more)
    visitor.note("structured", (await _post(visitor, "chat/completions", body, visitor.a_tenant()))[0], SERVED)


async def batch(visitor: Visitor) -> None:
    """A batch of some lines, which is waited for or cancelled; its files are deleted."""
    random, tenant = visitor.random, "steady"
    asked = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        json.dumps(asked | {"custom_id": str(number), "body": visitor.chat(max_tokens=random.randint(1, 20))})
        for number in range(random.randint(1, MAX_BATCH_LINES))
    ]
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", "\n".join(lines).encode())}}
    status, file = await _ask(visitor, "POST", "files", tenant, {}, **form)
    visitor.note("file", status, SERVED)
    if status != 200:
        return
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    status, reply = await _post(visitor, "batches", wanted, tenant)
    visitor.note("batch", status, SERVED | {400})  # 400: as many of the tenant's as may be are open
    if status != 200:
        return
    one, path = reply, f"batches/{reply['id']}"
    polls = random.choice((0, BATCH_POLLS))
    while polls and one.get("status") not in ("completed", "failed", "expired", "cancelled"):
        polls -= 1
        await asyncio.sleep(POLL_SECONDS)
        status, found = await _ask(visitor, "GET", path, tenant, {})
        visitor.note("batch GET", status, SERVED)
        one = found if status == 200 else one
    if not polls:
        visitor.note("batch cancelled", (await _post(visitor, f"{path}/cancel", {}, tenant))[0], SERVED | {400, 409})
    for name in (file["id"], one.get("output_file_id"), one.get("error_file_id")):
        if name:
            visitor.note(
                "file DELETE", (await _ask(visitor, "DELETE", f"files/{name}", tenant, {}))[0], SERVED | {400, 409}
            )


async def short_lived_key(visitor: Visitor) -> None:
    """An admin makes a key with a budget of its own, its holder asks once, and it is revoked."""
    headers, url = visitor.server.admin_headers, f"{visitor.server.admin_url}/admin/v1/keys"
    made = {"tenant": "steady", "name": "soak", "settings": {"limits": {"cost": "1/month"}}}
    reply = await visitor.http.post(url, json=made, headers=headers)
    visitor.note("key", reply.status_code, {200, 201})
    if not reply.is_success:
        return
    key = reply.json()
    own = {"authorization": f"Bearer {key['key']}", "x-sluice-session": visitor.random.randbytes(6).hex()}
    try:
        status, _ = await _post(visitor, "chat/completions", visitor.chat(max_tokens=5), "steady", **own)
        visitor.note("key's answer", status, SERVED | {401})
    finally:  # also of a broken connection: a key that stays is memory that grows
        reply = await visitor.http.post(f"{url}/{key['id']}/revoke", json={}, headers=headers)
        visitor.note("key revoked", reply.status_code, {200})


DIALECTS: dict[Manner, float] = {  # by how often, beside a hundred chats
    response: 12,
    message: 8,
    structured: 8,
    conversation: 4,
    batch: 3,
    short_lived_key: 2,
}

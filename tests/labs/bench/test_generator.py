"""The generator against a server of known timing: each of its times is held to the server's own record."""

import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from random import Random
from threading import Barrier, Event
from typing import Any

import pytest

from labs.bench.exchange import Exchange, Outcome
from labs.bench.generator import SLOW_PAUSE_SECONDS, Generator, TenantLoad
from labs.bench.wire import Address
from labs.bench.workloads import CHAT, Session, Turn
from tests.labs.bench.conftest import KnownServer, Reply, Served

PATIENCE = 60.0  # seconds until something that must happen counts as not happening


def session(turns: int = 1, tokens: int = 3, wait: float = 0.0) -> Session:
    messages = [{"role": "user", "content": "a question"}]
    for number in range(turns):
        body = {"messages": list(messages), "stream": True, "max_tokens": tokens}
        answer = yield Turn(CHAT, body, tokens, wait=wait if number else 0.0)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]


def load(times: list[float] | None = None, make: Callable[[], Session] = session, **options: Any) -> TenantLoad:
    arrivals: Iterator[tuple[float, Session]] = iter([(at, make()) for at in times or ()])
    return TenantLoad("one", {"authorization": "Bearer sk"}, arrivals, make, **options)


def exchanges(server: KnownServer, *loads: TenantLoad, seconds: float = PATIENCE, **options: Any) -> list[Exchange]:
    address = Address.of(server.url)
    options = {"drain": PATIENCE, "timeout": PATIENCE, "random": Random(1)} | options
    return Generator(address, list(loads), seconds=seconds, **options).run().exchanges


def test_times_are_those_of_the_server(known_server: KnownServer) -> None:
    """From due to received takes at least as long as the server took from the request to each chunk."""
    known_server.script = lambda served: Reply(chunks=4, pause=0.01)
    numbers = count(1)
    found = exchanges(known_server, load([0.0, 0.01, 0.02], lambda: session(tokens=next(numbers))))
    assert [one.outcome for one in found] == [Outcome.ANSWERED] * 3
    streams = sorted(known_server.streams, key=lambda served: int(served.body["max_tokens"]))
    for one, served in zip(found, streams, strict=True):
        assert (one.prompt_tokens, one.output_tokens, len(one.token_times)) == (11, 4, 4)
        took = [at - served.arrived for at in served.sent]
        assert all(at - one.due >= least for at, least in zip(one.token_times, took, strict=True))
        assert one.due <= one.sent <= one.token_times[0] <= one.ended


def test_an_open_loop_waits_for_no_answer(known_server: KnownServer) -> None:
    """The server answers nothing until all have asked; each wait counts from the moment its request was due."""
    together = Barrier(5)

    def script(_: Served) -> Reply:
        together.wait(PATIENCE)
        return Reply()

    known_server.script = script
    times = [0.0, 0.02, 0.04, 0.06, 0.08]
    found = exchanges(known_server, load(times))
    assert [one.due for one in found] == times
    assert all(one.ttft is not None and one.ttft >= 0.08 - one.due for one in found)


def test_clients_wait_for_their_answers(known_server: KnownServer) -> None:
    together, running, most = Barrier(3), 0, 0

    def script(served: Served) -> Reply:
        nonlocal running, most
        with known_server.lock:
            running += 1
            most = max(most, running)
        if served.number < 3:
            together.wait(PATIENCE)
        with known_server.lock:
            running -= 1
        return Reply(chunks=1)

    known_server.script = script
    found = exchanges(known_server, load(clients=3), seconds=1.0)
    assert most == 3 and {one.outcome for one in found} == {Outcome.ANSWERED}
    assert known_server.connections <= 4  # they are used again; one was to see that the server is there


def test_a_session_sends_the_answer_back_after_its_wait(known_server: KnownServer) -> None:
    found = exchanges(known_server, load([0.0], lambda: session(turns=3, wait=0.01)))
    last = known_server.streams[-1].body["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == "word word word "
    assert [round(after.due - before.ended, 9) for before, after in pairwise(found)] == [0.01] * 2


def test_a_client_leaves_in_the_midst_of_an_answer(known_server: KnownServer) -> None:
    gone = Event()

    def script(_: Served) -> Reply:
        return Reply(chunks=2000, pause=0.0005, text="x" * 4000)

    known_server.script = script
    found = exchanges(known_server, load([0.0] * 4, lambda: session(tokens=5), leave=1.0))
    assert {one.outcome for one in found} == {Outcome.LEFT}
    assert all(1 <= len(one.token_times) < 2000 for one in found)
    for _ in range(int(PATIENCE / 0.01)):
        if all(served.is_cut for served in known_server.streams):
            gone.set()
            break
        time.sleep(0.01)
    assert gone.is_set()


def test_a_slow_reader_delays_its_server(known_server: KnownServer) -> None:
    known_server.script = lambda served: Reply(chunks=12, text="x" * 50)
    (slow,) = exchanges(known_server, load([0.0], slow=1.0))
    (quick,) = exchanges(known_server, load([0.0]))
    assert slow.is_slow and slow.outcome is Outcome.ANSWERED
    assert slow.total >= 2 * SLOW_PAUSE_SECONDS and len(slow.token_times) == len(quick.token_times) == 12


def test_a_refused_client_comes_back_as_it_is_told(known_server: KnownServer) -> None:
    def script(served: Served) -> Reply:
        if served.number < 2:
            return Reply(status=429, headers={"retry-after-ms": "20"})
        return Reply()

    known_server.script = script
    (one,) = exchanges(known_server, load([0.0], retries=2))
    assert (one.outcome, one.attempts) == (Outcome.ANSWERED, 3)
    assert one.ttft is not None and one.ttft >= 0.04  # since it was due, not since the last attempt


@pytest.mark.parametrize(
    ("reply", "retries", "outcome", "code"),
    [
        (Reply(status=503, headers={"x-should-retry": "false"}), 2, Outcome.REFUSED, "503 busy"),
        (Reply(status=429), 0, Outcome.REFUSED, "429 busy"),
        (Reply(status=400), 2, Outcome.REFUSED, "400 busy"),
        (Reply(is_whole=False), 0, Outcome.FAILED, "stream without [DONE]"),
        (Reply(odd={"choices": [7]}), 0, Outcome.FAILED, ""),
        (Reply(odd={"choices": [], "usage": {"prompt_tokens": "many"}}), 0, Outcome.ANSWERED, ""),
        (Reply(odd={"error": {"code": "\x1b[2Jfull"}}), 0, Outcome.FAILED, "\\x1b[2Jfull"),
    ],
)
def test_refusals_and_failures_have_their_codes(
    known_server: KnownServer, reply: Reply, retries: int, outcome: Outcome, code: str
) -> None:
    known_server.script = lambda served: reply
    (one,) = exchanges(known_server, load([0.0], retries=retries))
    assert (one.outcome, one.attempts) == (outcome, 1)
    assert one.code == code or (not code and "callback" in one.code)


def test_a_request_ends_at_its_timeout_or_with_the_benchmark(known_server: KnownServer) -> None:
    release = Event()

    def script(served: Served) -> Reply:
        release.wait(PATIENCE)
        return Reply()

    known_server.script = script
    try:
        (late,) = exchanges(known_server, load([0.0]), timeout=0.01)
        (unfinished,) = exchanges(known_server, load([0.0]), seconds=0.01, drain=0.01)
    finally:
        release.set()
    assert (late.outcome, late.code) == (Outcome.FAILED, "timeout")
    assert unfinished.outcome is Outcome.UNFINISHED and unfinished.total > 0


def test_a_server_that_is_gone_is_a_failure(known_server: KnownServer) -> None:
    address = Address.of(known_server.url)
    known_server.shutdown()
    known_server.server_close()
    run = Generator(address, [load([0.0])], seconds=PATIENCE, drain=PATIENCE, timeout=PATIENCE, random=Random(1)).run()
    assert run.exchanges[0].outcome is Outcome.FAILED and "ConnectionRefusedError" in run.exchanges[0].code


def test_clients_begin_and_end_at_their_own_moments(known_server: KnownServer) -> None:
    found = exchanges(known_server, load(clients=2, start=0.05, stop=0.1), load([0.0, 0.2]), seconds=0.3)
    times = sorted(one.due for one in found)
    assert times[0] == 0.0 and times[-1] == 0.2
    assert len(times) > 3 and all(0.05 <= due < 0.1 for due in times[1:-1])


def test_a_broken_stream_has_told_its_use(known_server: KnownServer) -> None:
    known_server.script = lambda served: Reply(chunks=4, is_broken=True)
    (found,) = exchanges(known_server, load([0.0]))
    assert (found.outcome, found.has_usage) == (Outcome.FAILED, True)
    assert (found.prompt_tokens, found.output_tokens) == (11, 4)

from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest

from labs.benchmarks.overload_live import (
    FIRST_TOKEN,
    GIVEN_UP,
    GOOD,
    INTERVAL,
    REFUSAL_P99,
    TOKENS,
    UNAVAILABLE,
    Asked,
    Conversations,
    _beyond,
    capacity_of,
    figures_of,
)
from labs.benchmarks.traffic import Due, Exchange, Heard

DUE = 5.0
ASKED = Asked(Due(DUE, "a", b""), prompt_tokens=30, output_tokens=11)


def answered(first: float, interval: float) -> Exchange:
    """A request whose first token comes `first` seconds after it was due, and then one every `interval`."""
    return Exchange("a", DUE, DUE, DUE + first, DUE + first + 10 * interval, status=200)


@pytest.mark.parametrize(
    ("exchange", "good"),
    [
        (answered(0.9 * FIRST_TOKEN, 0.9 * INTERVAL), True),
        (answered(1.1 * FIRST_TOKEN, 0.9 * INTERVAL), False),
        (answered(0.9 * FIRST_TOKEN, 1.1 * INTERVAL), False),
        (Exchange("a", DUE, DUE, DUE + 0.1, None, status=200), False),
        (Exchange("a", DUE, DUE, refused=DUE + 0.1, status=UNAVAILABLE), False),
    ],
)
def test_good_is_a_whole_answer_with_every_token_in_time(exchange: Exchange, good: bool) -> None:
    assert ASKED.is_good(exchange) is good


def test_figures_leave_out_the_start_and_tell_refusals_from_expired_requests() -> None:
    exchanges = [
        Exchange("a", 0.5, 0.5, refused=9.0, status=UNAVAILABLE),
        answered(0.1, 0.01),
        answered(2.0, 0.01),
        Exchange("a", DUE, DUE, refused=DUE + 0.02, status=UNAVAILABLE),
        Exchange("a", DUE, DUE + 0.004, refused=DUE + 1.0, status=GIVEN_UP),
    ]
    early = Asked(Due(0.5, "a", b""), 30, 11)
    figures = figures_of([early, *[ASKED] * 4], Heard(10.0, exchanges), seconds=10.0)
    assert figures[GOOD] == pytest.approx(1 / 9)
    assert figures[TOKENS] == pytest.approx(41 / 9)
    assert [figures[what] for what in ("good", "refused", "given up", "served late")] == [0.25] * 4
    assert figures[REFUSAL_P99] == pytest.approx(20)
    assert figures["sent late at most, ms"] == pytest.approx(4)


def test_a_machine_too_busy_to_serve_in_time_is_reported_without_a_division_by_zero() -> None:
    figures = figures_of([], Heard(10.0, []), seconds=10.0)
    assert not any(figures.values())
    assert _beyond({"1x": {GOOD: [0.0, 2.0, 2.0]}, "2x": {GOOD: [3.0, 3.0, 0.0]}}, GOOD) == 0


def test_capacity_is_measured_until_a_request_was_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clients(AbstractContextManager["Clients"]):
        def __init__(self, port: int) -> None: ...

        def __exit__(self, *exception: object) -> None: ...

        def run(self, seconds: float, loops: object) -> Heard:
            return Heard(seconds, [Exchange("a", 0.0, 0.0, 3.0, 3.5, status=200)] if seconds > 3.5 else [])

    monkeypatch.setattr("labs.benchmarks.overload_live.Traffic", Clients)
    server = SimpleNamespace(port=0, keys={})
    assert capacity_of(server, Conversations(server, [], 0), 1.0) == 1 / 2  # type: ignore[arg-type]

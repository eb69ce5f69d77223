"""Devices apart and together: times by hand, and everything that was asked for comes once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.simulation.arrival import Arrival, Turn
from labs.simulation.device import Device, Piece
from labs.simulation.errors import OptionError
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.pools.link import Link
from labs.simulation.pools.pools import Split, check, simulate_split, splits
from labs.simulation.recorder import Objective
from tests.examples import examples

STEP = Piece(fixed=1.0, prefill=0.1, decode=0.0, decode_context=0.0, prefill_context=0.0)
DEVICE = Device("by hand", STEP.seconds, STEP, 4000, kv_bytes_per_token=10.0)
POLICY = parse_simulated_policy("fcfs,overload=unbounded,prefix_cache=off,calibration=off,max_model_len=400", DEVICE)
GOOD = Objective(5.0, 1.5)
APART = Split(prefill=1, decode=1)


def test_one_request_apart_by_hand() -> None:
    """A prompt of 20: 3 s to its first token; 200 bytes at 100 a second and 0.5 s: 2.5 s; then a second for each."""
    found = simulate_split(APART, POLICY, [Arrival(0.0, 20, 5)], DEVICE, Link(100.0, 0.5), GOOD)
    assert found.first_token.p50 == pytest.approx(3.0)
    assert found.per_token.p50 == pytest.approx((2.5 + 4 * 1.0) / 4)
    assert found.goodput == 0.0, "1.6 s a token"
    assert (found.prefill_busy, found.link_busy) == (pytest.approx(3.0 / 9.5), pytest.approx(2.0 / 9.5))


def test_a_long_prompt_does_not_hold_up_answers_that_are_decoded_elsewhere() -> None:
    requests = [Arrival(0.0, 20, 20, max_tokens=20), Arrival(4.0, 100, 1, max_tokens=1)]
    link = Link(1e9)
    apart = simulate_split(APART, POLICY, requests, DEVICE, link, GOOD)
    together = simulate_split(Split(together=1), POLICY, requests, DEVICE, link, GOOD)
    assert apart.per_token.p99 == pytest.approx(1.0)
    assert together.per_token.p99 is not None and together.per_token.p99 > 1.4, "10 s of prefill beside its decodes"


def test_a_request_with_a_first_token_waits_for_the_rest_by_its_last_deadline() -> None:
    requests = [Arrival(0.0, 20, 5, patience=4.0, done_within=within) for within in (20.0, 9.0)]
    for request, good in zip(requests, (1.0, 0.0), strict=True):
        found = simulate_split(APART, POLICY, [request], DEVICE, Link(100.0, 0.5), Objective(5.0, 2.0))
        assert (found.completed, found.goodput) == (1, good), "9.5 s in all"


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=25),
    st.integers(2, 4),
)
def test_every_request_is_answered_whole_by_every_split(shapes: list[tuple[float, int, int]], devices: int) -> None:
    requests = [Arrival(time, prompt, output) for time, prompt, output in sorted(shapes)]
    for split in splits(devices):
        found = simulate_split(split, POLICY, requests, DEVICE, Link(1e4), GOOD)
        assert found.completed == found.offered == len(requests)
        assert 0 < found.prefill_busy <= 1 + 1e-9 and 0 <= found.decode_busy <= 1 + 1e-9


def test_requests_that_pools_cannot_simulate_are_refused() -> None:
    with pytest.raises(OptionError, match="kv_bytes_per_token"):
        check(POLICY, [], Device("d", STEP.seconds, STEP, 100))
    with pytest.raises(OptionError, match="several turns"):
        check(POLICY, [Arrival(0.0, 5, 5, turns=(Turn(1.0, 5, 5),))], DEVICE)
    with pytest.raises(OptionError, match="not drafted"):
        check(parse_simulated_policy("speculate=2", DEVICE), [], DEVICE)

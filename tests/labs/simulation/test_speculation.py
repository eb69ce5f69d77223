"""Drafted tokens: what they bring and cost, by hand and by their law."""

from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.simulation.arrival import Arrival
from labs.simulation.device import Device, Piece
from labs.simulation.errors import OptionError
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.speculation import Speculation
from labs.simulation.study import simulate_run
from labs.simulation.summary import Summary
from tests.examples import examples

PLAIN = "fcfs,overload=unbounded,prefix_cache=off,calibration=off"
BOUND_BY_MEMORY = Piece(fixed=1.0, prefill=0.01, decode=0.0, decode_context=0.0, prefill_context=0.0)
BOUND_BY_ARITHMETIC = Piece(fixed=0.1, prefill=1.0, decode=1.0, decode_context=0.0, prefill_context=0.0)


def run(piece: Piece, settings: str, requests: list[Arrival]) -> Summary:
    device = Device("by hand", piece.seconds, piece, 4000)
    return simulate_run(parse_simulated_policy(f"{PLAIN},{settings}", device), requests, device, Objective())


def test_drafting_nothing_is_no_speculation() -> None:
    requests = [Arrival(0.3 * n, 10 + n, 5 + n % 7) for n in range(20)]
    one_at_a_time = "speculate=0", "steps_in_flight=1"
    first, second = (run(BOUND_BY_MEMORY, text, requests) for text in one_at_a_time)
    assert (first.steps, first.duration, first.busy) == (second.steps, second.duration, second.busy)


def test_smart_drafts_while_it_pays_and_never_loses_to_a_fixed_number() -> None:
    requests = [Arrival(0.0, 10, 30) for _ in range(4)]
    for piece, acceptance in ((BOUND_BY_MEMORY, 0.7), (BOUND_BY_ARITHMETIC, 0.3)):
        smart, fixed, none = (
            run(piece, f"speculate={kind},acceptance={acceptance}", requests).seconds for kind in ("smart:4", "4", "0")
        )
        assert smart <= 1.02 * min(fixed, none)
    assert none < fixed, "where each token costs as much, drafting in vain does too"


def test_a_tenant_whose_tokens_are_not_accepted_pays_for_them() -> None:
    requests = [Arrival(0.0, 10, 40, tenant=tenant, max_tokens=41) for tenant in ("lucky", "unlucky") for _ in range(4)]
    found = run(BOUND_BY_ARITHMETIC, "speculate=3,acceptance=lucky:0.9+unlucky:0.1", requests)
    times = {tenant.name: tenant.time_share for tenant in found.tenants}
    assert times["unlucky"] > 1.5 * times["lucky"], "as many tokens, in more steps"


@given(st.floats(0, 1), st.integers(0, 8))
def test_mean_tokens_of_a_drafting_row_are_a_geometric_sum(rate: float, drafted: int) -> None:
    expected = Speculation(8, acceptance={"": rate}).expected("anybody", drafted)
    closed = drafted + 1 if isclose(rate, 1.0) else (1 - rate ** (drafted + 1)) / (1 - rate)
    assert expected == pytest.approx(closed, rel=1e-6)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.integers(1, 40), st.integers(1, 30), st.booleans()), min_size=1, max_size=20
    ),
    st.sampled_from(["speculate=4,acceptance=0.7", "speculate=smart:6,acceptance=0.5,draft=0.05"]),
    st.sampled_from([200, 4000]),
)
def test_every_answer_has_its_tokens_and_no_more(
    shapes: list[tuple[float, int, int, bool]], speculation: str, kv_tokens: int
) -> None:
    requests = [
        Arrival(time, prompt, output, max_tokens=output + longer) for time, prompt, output, longer in sorted(shapes)
    ]
    found = run(BOUND_BY_MEMORY, f"{speculation},max_model_len=100,kv_tokens={kv_tokens}", requests)
    assert found.completed == len(requests)
    assert round(found.output_rate * found.seconds) == sum(one.output_tokens for one in requests)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speculate=often", "whole number"),
        ("speculate=33", "from 0 to 32"),
        ("acceptance=0.5", "needs speculate=N"),
        ("speculate=2,acceptance=2", "from 0 to 1"),
        ("speculate=2,draft=1", "below 1"),
        ("speculate=clever:2", "smart:N"),
    ],
)
def test_impossible_drafting_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(BOUND_BY_MEMORY, text, [])

"""Two pools in one time: memory is held on one side until the other has it all, and no memory stays behind."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.simulation.arrival import Arrival
from labs.simulation.device import Device, Piece
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.pools.link import Link
from labs.simulation.pools.replica import HalfReplica
from labs.simulation.pools.two_pools import TwoPools
from tests.examples import examples

STEP = Piece(fixed=1.0, prefill=0.1, decode=0.0, decode_context=0.0, prefill_context=0.0)
DEVICE = Device("by hand", STEP.seconds, STEP, 4000, kv_bytes_per_token=10.0)
SHAPES = st.tuples(
    st.floats(0, 5), st.integers(1, 60), st.integers(1, 12), st.integers(0, 2), st.none() | st.floats(0, 30)
)  # seconds since the one before, prompt, answer, tenant, and when its client leaves
SCARCE = "kv_tokens=160,max_model_len=80"


def policy(more: str = "max_model_len=400", overload: str = "unbounded") -> SimulatedPolicy:
    return parse_simulated_policy(f"order=fair,overload={overload},prefix_cache=off,calibration=off,{more}", DEVICE)


def requests(*shapes: tuple[float, int, int]) -> list[Arrival]:
    return [Arrival(time, prompt, output, number) for number, (time, prompt, output) in enumerate(shapes)]


def held(pool: list[HalfReplica]) -> int:
    for replica in pool:
        replica.core.scheduler.check_integrity()
    return sum(replica.core.scheduler.kv_manager.num_held for replica in pool)


@pytest.mark.parametrize(
    ("moment", "free_at"),
    [(1.0, 3.0), (4.0, 5.0), (7.5, 9.0)],
    ids=["while its prompt is computed", "while it is sent", "while it is answered"],
)
def test_a_cancelled_request_is_free_on_both_sides(moment: float, free_at: float) -> None:
    """What a step or a transfer under way writes to is free when that has ended."""
    pools = TwoPools(1, 1, policy(), DEVICE, Link(100.0))
    pools.give(requests((0.0, 20, 50))[0])
    pools.advance(moment)
    pools.cancel(0, moment)
    pools.advance(free_at - 0.01)
    before = held(pools.first) + held(pools.second)
    pools.advance(free_at)
    assert before > 0 and held(pools.first) + held(pools.second) == 0
    pools.cancel(0, free_at)
    pools.advance(inf)
    assert pools.answers[0].last is None


def test_an_answer_that_is_too_late_is_given_up_where_the_core_does_so() -> None:
    late = requests((0.0, 20, 50))[0]._replace(done_within=12.0)
    for overload, is_given_up in (("unbounded", False), ("deadline", True)):
        pools = TwoPools(1, 1, policy(overload=overload), DEVICE, Link(100.0))
        pools.run([late])
        assert (pools.answers[0].last is None) is is_given_up
        assert held(pools.first) + held(pools.second) == 0


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["max_model_len=400", SCARCE, f"{SCARCE},memory=optimistic"]),
    st.sampled_from([20.0, 100.0, 1e6]),
)
def test_tokens_are_conserved_and_no_block_is_leaked(
    shapes: list[tuple[float, int, int, int, float | None]], prefill: int, decode: int, more: str, rate: float
) -> None:
    """Tenants share memory that is scarce, over links that may be slow, and some of the clients leave."""
    pools, now, given_up = TwoPools(prefill, decode, policy(more), DEVICE, Link(rate)), 0.0, list[tuple[float, int]]()
    wanted = dict[int, int]()
    for number, (gap, prompt, output, tenant, leaves) in enumerate(shapes):
        now += gap
        pools.advance(now)
        pools.give(Arrival(now, prompt, output, number, f"t{tenant}"))
        wanted[number] = output
        if leaves is not None:
            given_up.append((now + leaves, number))
    for moment, number in sorted(given_up):
        pools.advance(max(now, moment))
        pools.cancel(number, max(now, moment))
        held(pools.first), held(pools.second)
    pools.advance(inf)
    assert held(pools.first) == held(pools.second) == 0
    left = {number for _, number in given_up}
    assert all(one.last is not None for number, one in pools.answers.items() if number not in left)
    whole = [number for number, one in pools.answers.items() if one.last is not None]
    brought = sum(replica.output_tokens for replica in pools.second)
    sent = sum(wanted[number] for number in whole if wanted[number] > 1)
    assert brought >= sent and (left or brought == sent), "the token that is known, and every other once"

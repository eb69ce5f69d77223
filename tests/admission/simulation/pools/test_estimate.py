"""What devices together and apart could serve, by hand, and held to what the simulator finds."""

from dataclasses import replace
from random import Random

import pytest

from admission.simulation.arrival import Arrival
from admission.simulation.device import DEVICES, Device, Piece
from admission.simulation.policy import parse_simulated_policy
from admission.simulation.pools.estimate import Shape, apart, pays, pays_up_to, prompts_first, together
from admission.simulation.pools.link import Link
from admission.simulation.pools.pools import Split, simulate_split
from admission.simulation.recorder import Objective

PIECE = Piece(fixed=10e-3, prefill=0.1e-3, decode=0.0, decode_context=0.0, prefill_context=0.0)
SIMPLE = Device("by hand", PIECE.seconds, PIECE, 11_000, kv_bytes_per_token=1e5)
SHAPE = Shape(prompt=1000, answer=100, first_token=1.0, per_token=0.03)
FAST = Link(100e9 / 8)
A100 = DEVICES["llama3-8b-a100"]


def test_apart_by_hand() -> None:
    """A prompt takes 110 ms, so by M/D/1 a device may be busy for 1.78 of 1.89 s; ten answers fit the memory."""
    found = apart(SIMPLE, SHAPE, FAST)
    assert found.prompt_seconds == pytest.approx(0.11)
    assert found.prefill_rate == pytest.approx(1.78 / 1.89 / 0.11)
    assert (found.decodes, found.decode_rate) == (10, pytest.approx(10 / 100 / 0.01))
    assert found.link_seconds == pytest.approx(0.008)
    assert found.prefill == 4 and found.rate == pytest.approx(4 * found.prefill_rate / 8)


def test_together_by_hand() -> None:
    """Steps of 30 ms have 200 tokens of a prompt, five of them one; ten answers take 50 of those, or 100 alone."""
    found = together(SIMPLE, SHAPE)
    assert (found.decodes, found.chunk) == (10, 200)
    share = 0.15 * found.rate
    steps = share / 0.03 + (1 - share) / 0.01
    assert found.rate * 100 == pytest.approx(10 * steps), "as many tokens as its steps bring"


def test_whole_prompts_first_by_hand() -> None:
    """Ten decodes in 10 ms, which wait for two thirds of the time at the most; prompts take 0.11 s."""
    found = prompts_first(SIMPLE, SHAPE)
    assert found.rate == pytest.approx(10 * 0.11 / (100 * 0.01 + 10 * 0.11) / 0.11)
    tight = prompts_first(SIMPLE, replace(SHAPE, per_token=0.0125))
    assert tight.rate == pytest.approx(0.2 / 0.11), "a fifth of the time, so that a token comes every 12.5 ms"


def test_a_slow_link_bounds_what_a_device_sends() -> None:
    slow = apart(SIMPLE, SHAPE, Link(1e8))
    assert slow.link_seconds == pytest.approx(1.0) and slow.prefill_rate == pytest.approx(1.0)
    assert apart(SIMPLE, replace(SHAPE, per_token=0.012), Link(1e8)).rate == 0.0, "10 ms of transfer for each token"


def test_what_nobody_can_keep_pays_for_nobody() -> None:
    impossible = replace(SHAPE, per_token=0.009)
    assert together(SIMPLE, impossible).rate == apart(SIMPLE, impossible, FAST).rate == 0.0
    assert not pays(SIMPLE, impossible, FAST)
    assert pays_up_to(SIMPLE, replace(SHAPE, first_token=0.05), FAST) is None


@pytest.mark.parametrize("shape", [Shape(1135, 210, 2.0, 0.1), Shape(2016, 28, 2.0, 0.1)], ids=["chats", "code"])
def test_tight_times_between_tokens_are_what_it_pays_for(shape: Shape) -> None:
    longest = pays_up_to(A100, shape, FAST)
    assert longest is not None and 0.025 < longest < 0.1
    assert pays(A100, replace(shape, per_token=0.025), FAST) and not pays(A100, shape, FAST)


@pytest.mark.parametrize(("per_token", "is_better"), [(0.022, True), (0.1, False)])
def test_the_simulator_finds_the_same(per_token: float, is_better: bool) -> None:
    """At the rate that the better of both could serve, by arithmetic, the worse has fewer good requests."""
    shape = Shape(1000, 100, 2.0, per_token)
    both, split = together(A100, shape), apart(A100, shape, FAST)
    assert (split.rate > both.rate) is is_better
    policy = parse_simulated_policy("fcfs,overload=unbounded,max_num_batched_tokens=512,prefill_chunk=512", A100)
    random, now, requests = Random(1), 0.0, list[Arrival]()
    devices = 4
    while (now := now + random.expovariate(0.9 * devices * max(both.rate, split.rate))) < 20.0:
        requests.append(Arrival(now, shape.prompt, shape.answer, tenant="one"))
    good = Objective(shape.first_token, shape.per_token)
    ways = [Split(together=devices), *(Split(prefill=number, decode=devices - number) for number in (1, 2, 3))]
    one, *others = (simulate_split(way, policy, requests, A100, FAST, good).goodput for way in ways)
    assert (max(others) > one) is is_better

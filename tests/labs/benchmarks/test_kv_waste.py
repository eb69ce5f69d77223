"""What of KV memory is used is weighed to the slot and to the second."""

import pytest

from labs.benchmarks.kv_waste import MAX_TOKENS, WINDOW_SECONDS, Allocation, Run, Use, Weighed, simulate
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content

KNOWN = Allocation("lengths known", max_tokens=0)  # so that no step computes a token too many


def alone(prompt: int, output: int, allocation: Allocation = KNOWN) -> Run:
    return simulate([Arrival(0.0, prompt, output, tenant="acme")], allocation)


def test_a_block_with_room_is_waste_for_as_long_as_it_has_room() -> None:
    run = alone(15, 1)  # one step, which computes 15 tokens of 16
    assert run.weighed.waste == pytest.approx(1 / 16)
    assert run.weighed.by_tenant["held"] == {"acme": pytest.approx(16 * run.seconds)}
    assert run.weighed.by_tenant["written"] == {"acme": pytest.approx(15 * run.seconds)}


def test_full_blocks_are_no_waste_and_contiguous_memory_is_held_for_all_that_is_declared() -> None:
    assert alone(32, 1).weighed.waste == 0
    contiguous = alone(32, 200, Allocation("contiguous", is_contiguous=True)).weighed
    assert contiguous.waste == pytest.approx(1 - 132 / (32 + MAX_TOKENS), abs=0.01)
    last = contiguous.total("leaving") / contiguous.total("held")
    assert last == pytest.approx(1 / 201, rel=0.1), "of what has ended memory is held for one step more"


def test_unheld_blocks_are_idle_if_they_can_be_found_again() -> None:
    first = Arrival(0.0, 32, 1, tenant="acme", content=Content((1,), None))
    later = Arrival(100.0, 32, 1, tenant="beta", content=Content((2,), None))
    run = simulate([first, later], KNOWN)
    idle = run.weighed.by_tenant["idle"]["acme"]
    assert 99 * 32 < idle < 101 * 32
    assert "beta" not in run.weighed.by_tenant["idle"]


def test_time_is_split_between_windows_and_the_worst_is_told() -> None:
    weighed = Weighed()
    weighed.add(Use({"a": 10, "b": 30}, {"b": 3}, {}, {}, {}, {}), WINDOW_SECONDS / 2, 2 * WINDOW_SECONDS)
    weighed.add(Use({"a": 40}, {"a": 20}, {}, {}, {}, {}), 2 * WINDOW_SECONDS, 3 * WINDOW_SECONDS)
    assert weighed.unused == pytest.approx({0: 3 * WINDOW_SECONDS / 2, 1: 3 * WINDOW_SECONDS, 2: 20 * WINDOW_SECONDS})
    assert weighed.worst_window == pytest.approx(0.5)
    assert weighed.worst_tenant == "a"
    assert weighed.waste == pytest.approx((3 * 1.5 + 20) / (40 * 1.5 + 40))

from random import Random

import pytest

from admission.reserve import EVEN, LARGEST, MOST_KEPT, Reserve


def poisson(reserve: Reserve, rates: dict[str, float], seconds: float, each: float = 0.1, seed: int = 1) -> float:
    """Tenants ask for so many seconds of engine time a second, `each` a request; returns when it ends."""
    random, now = Random(seed), 0.0
    total = sum(rates.values())
    while now < seconds:
        now += random.expovariate(total / each)
        tenant = random.choices(list(rates), list(rates.values()))[0]
        reserve.offered(tenant, 1.0, each, 0.0, now)
        if reserve.is_needed and not reserve.is_beyond(tenant):
            reserve.arrived_within(each, 2.0, now)
    return now


def test_a_flood_is_seen_whoever_else_has_asked_before() -> None:
    others = {f"t{number}": 0.4 / (LARGEST + 20) for number in range(LARGEST + 20)}
    reserve = Reserve()
    begun = poisson(reserve, others, 300)
    for number in range(200):
        now = begun + 0.05 * number
        reserve.offered("flood", 1.0, 0.1, 0.0, now)
        if number % 5 == 0:
            reserve.offered(f"t{number // 5}", 1.0, 0.1, 0.0, now)
    assert reserve.is_needed and reserve.is_beyond("flood")
    assert not any(reserve.is_beyond(tenant) for tenant in others)


def test_nobody_leaves_anything_while_there_is_enough_for_all() -> None:
    reserve = Reserve()
    now = poisson(reserve, {"a": 0.6, "b": 0.2}, 200)
    assert not reserve.is_needed and not reserve.is_beyond("a")
    assert reserve.room("a", 2.0, now).seconds == 0.0


def test_a_flood_leaves_what_the_others_wait_for_each_other_and_no_more() -> None:
    reserve = Reserve()
    now = poisson(reserve, {"flood": 2.0, "x": 0.15, "y": 0.15, "z": 0.15}, 200)
    assert reserve.is_needed and reserve.is_beyond("flood")
    assert not any(reserve.is_beyond(tenant) for tenant in "xyz")
    assert reserve.room("x", 2.0, now).seconds == 0.0
    room = reserve.room("flood", 2.0, now).seconds
    assert 0.1 < room < 1.0
    assert reserve.room("flood", 0.1, now).seconds <= MOST_KEPT * 0.1


def test_room_says_how_much_of_it_is_for_others_and_how_far_its_tenant_is_beyond_its_share() -> None:
    reserve = Reserve()
    now = poisson(reserve, {"flood": 2.0, "x": 0.15, "y": 0.15, "z": 0.15}, 200)
    room = reserve.room("flood", 2.0, now)
    assert 0.0 < room.kept <= room.seconds
    assert room.excess == pytest.approx(2.0 / 0.55 - 1.0, rel=0.3)
    assert reserve.room("x", 2.0, now).excess == 0.0


def test_more_that_others_ask_for_takes_more_room() -> None:
    rooms = []
    for each in (0.05, 0.1, 0.2):
        reserve = Reserve()
        now = poisson(reserve, {"flood": 2.0} | dict.fromkeys("xyz", each), 200)
        rooms.append(reserve.room("flood", 2.0, now).seconds)
    assert rooms == sorted(rooms)


def test_what_may_wait_longer_needs_no_room_before_what_may_not() -> None:
    reserve = Reserve()
    now = poisson(reserve, {"flood": 2.0, "x": 0.15, "y": 0.15, "z": 0.15}, 200)
    assert reserve.room("flood", 1.0, now).seconds == 0.0 < reserve.room("flood", 8.0, now).seconds


def test_of_those_beyond_their_share_who_had_more_leaves_more() -> None:
    reserve = Reserve()
    charged = {"a": 0.0, "b": 0.0}
    for step in range(2000):
        for tenant, share in (("a", 0.67), ("b", 0.33)):
            charged[tenant] += 0.05 * share
            reserve.offered(tenant, 1.0, 0.05, charged[tenant], 0.05 * step)
    assert reserve.is_beyond("a") and reserve.is_beyond("b")
    assert reserve.room("b", 2.0, 100.0).seconds == 0.0
    assert reserve.room("a", 2.0, 100.0).seconds == pytest.approx(2.0 * (0.67 / 0.5 - EVEN), rel=0.05)


def test_a_heavier_tenant_has_a_larger_share() -> None:
    reserve = Reserve()
    for step in range(2000):
        reserve.offered("heavy", 1.0, 0.05 * 0.7, 0.0, 0.05 * step)
        reserve.offered("light", 0.25, 0.05 * 0.7, 0.0, 0.05 * step)
    assert reserve.is_needed and reserve.is_beyond("light") and not reserve.is_beyond("heavy")


def test_many_small_tenants_are_followed_together() -> None:
    reserve = Reserve()
    random, now = Random(1), 0.0
    for _ in range(8_000):
        now += 0.01
        reserve.offered(f"small-{random.randrange(500)}", 1.0, 0.004, 0.0, now)
        reserve.offered("flood", 1.0, 0.02, 0.0, now)
    assert reserve.is_beyond("flood")
    assert not any(reserve.is_beyond(f"small-{n}") for n in range(500))


def test_what_was_long_ago_is_forgotten() -> None:
    reserve = Reserve()
    now = poisson(reserve, {"flood": 2.0, "x": 0.4}, 200)
    assert reserve.room("flood", 2.0, now).seconds > 0
    for step in range(1000):
        reserve.offered("flood", 1.0, 0.4, 0.0, now + 0.2 * step)
    assert reserve.room("flood", 2.0, now + 200).seconds == 0.0

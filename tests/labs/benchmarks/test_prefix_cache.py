from labs.benchmarks.prefix_cache import lru_found
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content


def asked(tenant: str, tokens: int = 160) -> Arrival:
    return Arrival(0.0, tokens, 1, tenant=tenant, content=Content((1,), None))


def test_an_exact_lru_tells_tenants_apart_and_gives_up_what_was_used_longest_ago() -> None:
    arrivals = [asked("a"), asked("a"), asked("b"), asked("a"), asked("b")]
    assert lru_found(arrivals, blocks=20) == [0, 144, 0, 144, 144]
    assert lru_found(arrivals, blocks=10) == [0, 144, 0, 0, 0]

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.backlog import Load
from admission.scheduling_policy import MAX_SHARED_QUEUE_FILL_BOUNDS, QueueBounds
from tests.examples import examples


@pytest.mark.parametrize("unit", ["count", "tokens", "bytes", "seconds"])
def test_each_bound_is_kept_and_named(unit: str) -> None:
    waiting, newcomer = Load(2, 20, 200, 2.0), Load(1, 10, 100, 1.0)
    most = getattr(waiting, unit) + getattr(newcomer, unit)
    assert QueueBounds(**{unit: most}).excess(waiting, newcomer) is None
    excess = QueueBounds(**{unit: most - 0.5}).excess(waiting, newcomer)
    assert excess is not None and (excess.unit, excess.load) == (unit, most)


def test_an_empty_queue_takes_anything() -> None:
    assert QueueBounds(count=1, tokens=1, bytes=1, seconds=1e-9).excess(Load(), Load(1, 10, 10, 1.0)) is None


def test_a_bound_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a bound on waiting bytes must be above 0, got 0"):
        QueueBounds(bytes=0)


class Shared:
    """A queue that tenants share."""

    def __init__(self, **bounds: float) -> None:
        self.bounds = QueueBounds(**bounds)
        self.total = Load()
        self.tenants: dict[str, Load] = {}

    def offer(self, tenant: str, newcomer: Load) -> bool:
        """Whether it is let in."""
        own = self.tenants.get(tenant, Load())
        if self.bounds.shared_excess(self.total, own, len(self.tenants), newcomer) is not None:
            return False
        self.total += newcomer
        self.tenants[tenant] = own + newcomer
        return True

    def fill(self, tenant: str, newcomer: Load) -> int:
        """As many as are let in."""
        count = 0
        while self.offer(tenant, newcomer):
            count += 1
        return count

    def drain(self, tenant: str) -> None:
        self.tenants.pop(tenant, Load()).subtract_from([self.total])


def test_tenants_that_fill_a_queue_one_after_another_leave_room_for_the_next() -> None:
    queue = Shared(count=64, tokens=6400)
    assert [queue.fill(tenant, Load(1, 100)) for tenant in "abcdefg"] == [64, 32, 16, 8, 4, 2, 1]


def test_tenants_that_share_a_full_queue_come_to_hold_equal_parts_of_it() -> None:
    queue = Shared(count=60)
    for tenant in "abc":
        queue.fill(tenant, Load(1))
    for tenant in "abcabc":  # each drains, and fills the queue again
        queue.drain(tenant)
        queue.fill(tenant, Load(1))
    assert {tenant: own.count for tenant, own in queue.tenants.items()} == dict.fromkeys("abc", 20)


@pytest.mark.parametrize("tenants", [3, 7, 49, 1000])
def test_an_equal_part_is_exact(tenants: int) -> None:
    bounds, full = QueueBounds(count=2 * tenants), Load(2 * tenants)
    assert bounds.shared_excess(full, Load(1), tenants, Load(1)) is None
    assert bounds.shared_excess(full, Load(2), tenants, Load(1)) is not None


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 30), st.booleans()), max_size=80),
    st.integers(1, 12),
    st.integers(30, 100),
)
def test_however_many_share_it_a_queue_takes_all_that_its_bound_allows_and_never_more_than_twice(
    steps: list[tuple[str, int, bool]], count: int, tokens: int
) -> None:
    queue = Shared(count=count, tokens=tokens)
    for tenant, size, drains in steps:
        if drains:
            queue.drain(tenant)
        newcomer = Load(1, size)
        is_full = queue.bounds.excess(queue.total, newcomer) is not None
        assert queue.offer(tenant, newcomer) or is_full
        assert (
            queue.total.count <= MAX_SHARED_QUEUE_FILL_BOUNDS * count
            and queue.total.tokens <= MAX_SHARED_QUEUE_FILL_BOUNDS * tokens
        )

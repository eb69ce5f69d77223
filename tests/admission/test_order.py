"""The order in which requests are due, against its definition."""

import gc
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.order import OLDEST_SHARE_OF_SERVICE, Aging, DueOrder, class_offsets
from admission.share import Share
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import PRESSING_WAIT_S, Sequence
from tests.backend.sequences import make_sequence
from tests.examples import examples

TENANTS = "abcd"
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "dated", "take", "leave", "again", "charge", "refund", "hold", "resume", "policy", "pass"]
        ),
        st.sampled_from(TENANTS),
        st.integers(0, 9),
    ),
    max_size=60,
)


AGING = class_offsets(2.0)


class Queue:
    """An order with its requests, of which the next is found by looking at all."""

    def __init__(self, aging: Aging = AGING) -> None:
        self.share = Share()
        self.order = DueOrder(self.share, aging, lambda s: 0.01 * s.num_prompt_tokens, lambda s: s.num_prompt_tokens)
        self.waiting: list[Sequence] = []
        self.taken: list[Sequence] = []
        self.held: set[str] = set()
        self.now, self.number = 0.0, 0

    def add(self, tenant: str, size: int, **fields: object) -> Sequence:
        self.number += 1
        fields |= {"arrival": self.now, "priority_class": size % 3}
        one = make_sequence(f"s{self.number}", tenant, 1 + size, 4, **fields)
        self.order.asked(one, self.now)
        self.wait(one)
        return one

    def wait(self, one: Sequence) -> None:
        self.order.add(one)
        self.share.opened(self.share.account(one.tenant))
        self.waiting.append(one)

    def remove(self, one: Sequence) -> None:
        self.waiting.remove(one)
        self.order.remove(one)
        self.share.closed(self.share.account(one.tenant))

    def happen(self, event: str, tenant: str, size: int) -> None:
        account = self.share.account(tenant)
        if event == "add":
            self.add(tenant, size)
        elif event == "dated":
            self.add(tenant, size, first_token_by=self.now + 0.5 * size)
        elif event == "take" and (head := self.order.head()) is not None:
            self.remove(head)
            self.taken.append(head)
            self.share.spend(account, 0.1)
        elif event == "leave" and self.waiting:
            self.remove(self.waiting[size % len(self.waiting)])
        elif event == "again" and self.taken:
            one = self.taken.pop(size % len(self.taken))
            one.num_preemptions += 1
            self.wait(one)
        elif event in {"charge", "refund"}:
            self.share.charge(account, 0.3 * size) if event == "charge" else self.share.spend(account, -0.3 * size)
        elif event in {"hold", "resume"}:
            self.held = self.held | {tenant} if event == "hold" else self.held - {tenant}
            reason = WaitReason.SLOTS if size % 2 else WaitReason.TOKENS
            self.order.hold(tenant, None if event == "resume" else reason)
        elif event == "policy":
            self.share.set_policy({tenant: 1.0 + size})
            self.order.set_policy(class_offsets(size / 2))
        elif event == "pass":
            self.now += 0.2 * size
            self.order.set_time(self.now)

    def due_first(self) -> float:
        """When the first is due: its deadline, or when the oldest of its tenant's others is."""
        offered = [one for one in self.waiting if one.tenant not in self.held]
        return min(map(self.order.due, offered), default=inf)


@settings(max_examples=examples(200, at_night=4000), deadline=None)
@given(EVENTS)
def test_the_head_is_of_the_tenant_that_is_due_first(events: list[tuple[str, str, int]]) -> None:
    queue = Queue()
    for event in events:
        queue.happen(*event)
        head, due = queue.order.head(), queue.due_first()
        if head is None:
            assert due == inf
            continue
        of_tenant = [queue.order.due(one) for one in queue.waiting if one.tenant == head.tenant]
        is_dated = any(entry.sequence is head for entry in queue.order.dated)
        assert (queue.order.due(head) if is_dated else min(of_tenant)) == pytest.approx(due)


def test_a_deadline_of_minutes_is_no_hurry() -> None:
    queue = Queue()
    patient, plain = queue.add("a", 3, first_token_by=600.0), queue.add("b", 3)
    assert queue.order.due(patient) == queue.order.due(plain) == queue.now
    assert queue.order.due(queue.add("c", 3, first_token_by=PRESSING_WAIT_S)) == PRESSING_WAIT_S


def test_a_deadline_that_has_passed_is_no_hurry_any_more() -> None:
    queue = Queue()
    late, plain = queue.add("a", 3, first_token_by=1.0), queue.add("b", 3)
    queue.remove(begun := queue.add("c", 3, first_token_by=1.0))
    queue.share.charge(queue.share.account("b"), 0.6)
    assert queue.order.head() is late
    queue.share.charge(queue.share.account("a"), 1.8)
    queue.happen("pass", "a", 6)
    assert queue.order.due(late) > queue.now > queue.order.due(plain)
    assert queue.order.head() is plain
    assert queue.order.due(begun) == 1.0, "it began before"
    queue.wait(begun)
    assert queue.order.due(begun) == pytest.approx(queue.now + queue.share.payback_of("c")), "it was preempted"


def test_debt_makes_a_tenants_requests_due_later_and_credit_makes_them_due_sooner() -> None:
    queue = Queue()
    heavy, light = queue.add("a", 3), queue.add("b", 3)
    queue.share.charge(queue.share.account("a"), 1.0)
    assert queue.order.due(heavy) == pytest.approx(1.0, abs=0.05)
    assert queue.order.due(light) == pytest.approx(-1.0, abs=0.05)
    assert queue.order.head() is light


def test_of_one_tenant_the_shortest_that_can_be_in_time_goes_first_and_the_oldest_has_its_part() -> None:
    queue = Queue()
    long = queue.add("a", 90)
    queue.happen("pass", "a", 5)
    short = queue.add("a", 0)
    assert queue.order.head() is short
    queue.now = 10.0
    queue.order.set_time(queue.now)
    assert queue.order.head() is long, "it can be in time no more, and nothing has gone first for it"
    queue.remove(long)
    others = [queue.add("a", 3 * n) for n in range(9)]
    taken = []
    while queue.waiting:
        head = queue.order.head()
        assert head is not None
        taken.append(head)
        queue.remove(head)
    assert set(taken) == {short, *others}
    assert 0 < OLDEST_SHARE_OF_SERVICE < 1


@pytest.mark.parametrize("others", [1, 40])
def test_a_lower_class_that_has_waited_for_its_offset_is_as_urgent_as_any(others: int) -> None:
    queue = Queue()
    low = queue.add("low", 2)
    assert low.request.priority_class == 2
    for _ in range(others):
        queue.happen("pass", "a", 1)
        high = queue.add("high", 0)
        if queue.now <= 1.0:
            assert queue.order.due(high) < queue.order.due(low)
    queue.happen("pass", "a", 9)
    queue.happen("pass", "a", 9)
    queue.happen("pass", "a", 9)
    assert queue.order.due(low) <= queue.now


def test_inside_a_class_a_backlog_does_not_go_first_for_its_age_but_its_class_has_aged() -> None:
    """Tenants of one class differ by debts, however large the class's offset is, and however long one has a backlog."""
    queue = Queue(class_offsets(20.0))
    for _ in range(3):
        queue.add("flood", 2)
    for _ in range(5):
        queue.happen("pass", "a", 9)
    newcomer = queue.add("light", 2)
    queue.share.charge(queue.share.account("flood"), 1.2)
    assert queue.order.head() is newcomer
    urgent = queue.add("urgent", 0)
    assert queue.order.head() is urgent
    for _ in range(22):
        queue.happen("pass", "a", 9)
    assert queue.order.due(newcomer) < queue.order.due(queue.add("new and urgent", 0))


def test_where_nobody_asks_for_a_more_urgent_class_a_request_yields_to_none_of_its_own_class() -> None:
    """The first class of a policy is seldom the default one: its offset must not set deadlines above the rest."""
    queue = Queue(class_offsets(20.0))
    plain = queue.add("a", 1)
    queue.happen("pass", "a", 2)
    assert plain.request.priority_class == 1
    dated = queue.add("b", 4, first_token_by=queue.now + 2.0)
    assert queue.order.due(plain) == queue.now < queue.order.due(dated)
    assert queue.order.head() is plain
    queue.add("c", 0)
    assert queue.order.due(plain) == pytest.approx(20.0)
    assert queue.order.head() is not plain
    urgent = queue.waiting[-1]
    queue.remove(urgent)
    queue.order.set_time(queue.now)
    assert queue.order.due(plain) == pytest.approx(20.0), "it runs"
    queue.order.ended(urgent)
    queue.order.set_time(queue.now)
    assert queue.order.due(plain) == queue.now, "no request of the urgent class is open"


def test_a_refused_request_of_an_urgent_class_delays_nobody() -> None:
    queue = Queue(class_offsets(20.0))
    plain = queue.add("a", 1)
    queue.order.asked(make_sequence("refused", "b", 4, 4, priority_class=0), queue.now)
    assert queue.order.due(plain) == 20.0, "as if it were admitted"
    queue.order.set_time(queue.now)
    assert queue.order.due(plain) == queue.now


def test_a_begun_request_stays_before_later_ones_of_its_class_when_a_more_urgent_class_is_asked_for() -> None:
    queue = Queue(class_offsets(20.0))
    begun, later = queue.add("a", 1), queue.add("b", 1)
    queue.happen("pass", "a", 45)
    queue.remove(begun)
    queue.happen("pass", "a", 5)
    assert queue.order.due(begun) < queue.order.due(later)
    queue.add("c", 0)
    assert queue.order.due(begun) <= queue.order.due(later) == 20.0


def test_a_begun_request_whose_class_had_aged_is_due_no_earlier_when_the_urgent_class_is_asked_for_no_more() -> None:
    queue = Queue(class_offsets(20.0))
    urgent, begun = queue.add("c", 0), queue.add("a", 1)
    queue.happen("pass", "a", 110)
    queue.remove(urgent)
    queue.remove(begun)
    queue.order.ended(urgent)
    due = queue.order.due(begun)
    queue.happen("pass", "a", 55)
    assert queue.order.due(begun) == due == 22.0


@pytest.mark.parametrize("seconds_per_class", [1.0, 100.0])
def test_an_edit_of_offsets_keeps_a_begun_request_before_later_ones_of_its_class(seconds_per_class: float) -> None:
    queue = Queue(class_offsets(20.0))
    begun, later = queue.add("a", 1), queue.add("b", 1)
    queue.happen("pass", "a", 5)
    queue.remove(begun)
    queue.happen("pass", "a", 5)
    queue.order.set_policy(class_offsets(seconds_per_class))
    assert queue.order.due(begun) == 1.0
    assert queue.order.due(later) == queue.now
    queue.add("c", 0)
    assert queue.order.due(begun) <= queue.order.due(later)


def test_a_preempted_request_puts_no_urgent_request_of_its_tenant_behind_another_tenants_lower_class() -> None:
    queue = Queue(class_offsets(20.0))
    low = queue.add("a", 2)
    queue.happen("take", "a", 0)
    urgent = queue.add("a", 0)
    queue.happen("again", "a", 0)
    default = queue.add("b", 1)
    assert queue.order.head() is urgent
    queue.remove(urgent)
    queue.remove(default)
    queue.add("a", 2)
    assert queue.order.head() is low, "it goes first in its class"


def test_an_edit_of_offsets_ranks_waiting_requests_by_the_new_ones() -> None:
    queue = Queue(class_offsets(2.0))
    low = queue.add("a", 2)
    queue.now = 2.0
    high = queue.add("a", 0)
    assert queue.order.undated["a"].oldest() is high
    queue.order.set_policy(class_offsets(0.5))
    assert queue.order.undated["a"].oldest() is low, "it is the older of two equals"


def test_what_goes_before_a_newcomer_counts_though_its_class_is_lower() -> None:
    """A lower class that has aged is due earlier than a newcomer's deadline, and so computed before it."""
    queue = Queue(class_offsets(2.0))
    aged = [queue.add("low", 8) for _ in range(5)]
    queue.now = 9.0
    newcomer = make_sequence("new", "high", 4, 4, priority_class=0, arrival=9.0, first_token_by=11.0)
    queue.order.asked(newcomer, queue.now)
    due = queue.order.due(newcomer)
    assert queue.order.due(aged[0]) < due
    assert queue.order.ahead(newcomer, due).tokens == sum(one.num_prompt_tokens for one in aged)


def test_a_backlog_that_never_ends_keeps_no_request_that_has_left() -> None:
    """A long request that left is behind shorter ones for ever, where the shortest go first."""
    queue = Queue()
    for _ in range(500):
        left = [queue.add("lasting", 99)]
        queue.remove(left[0])
        queue.add("lasting", 0)
        if len(queue.waiting) > 2 and (head := queue.order.head()) is not None:
            queue.remove(head)
            left.append(head)
        for one in left:
            queue.order.ended(one)
    kept = [one for one in gc.get_objects() if type(one) is Sequence and one.tenant == "lasting"]
    assert len(kept) < 200

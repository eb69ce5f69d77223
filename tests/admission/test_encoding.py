"""Batches of inputs: whom they serve, how large they are, and when they wait."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.encoding import BatchInput, BatchTime, EncodingLimits, EncodingQueue, EncodingRequest
from admission.share import Share
from tests.examples import examples

LIMITS = EncodingLimits(longest_wait_s=2e-3, batch_tokens=100, waiting_tokens=1000)
BATCH_S, TOKEN_S = 1e-3, 1e-5


def a_queue(weights: dict[str, float] | None = None, limits: EncodingLimits = LIMITS) -> EncodingQueue:
    queue = EncodingQueue(Share(weights), limits, BatchTime())
    queue.time.batch_s, queue.time.token_s = BATCH_S, TOKEN_S
    return queue


def added(queue: EncodingQueue, tenant: str, *lengths: int, at: float = 0.0) -> EncodingRequest:
    queue.add(request := EncodingRequest(tenant, lengths, at))
    return request


def test_a_short_request_passes_a_long_list_of_its_tenant() -> None:
    queue = a_queue()
    long = added(queue, "a", *[10] * 50)
    queue.take_batch(0.0)
    short = added(queue, "a", 10, at=1.0)
    batch = queue.take_batch(0.0)
    assert batch[0] == BatchInput(short, 0)
    assert [taken.ordinal for taken in batch[1:]] == list(range(10, 19)) and batch[1].request is long


def test_tenants_share_a_batch_by_weight_and_who_owes_waits() -> None:
    queue = a_queue({"heavy": 3.0})
    for tenant in ("a", "heavy"):
        queue.share.asked(queue.share.account(tenant))
        added(queue, tenant, *[5] * 60)
    tokens = {"a": 0, "heavy": 0}
    for taken in queue.take_batch(0.0):
        tokens[taken.request.tenant] += 5
    assert tokens == {"a": 25, "heavy": 75}
    queue.share.charge(queue.share.account("a"), 10.0)
    assert {taken.request.tenant for taken in queue.take_batch(0.0)} == {"heavy"}


def test_beside_answers_a_batch_is_as_short_as_its_limit_and_never_empty() -> None:
    queue = a_queue(limits=LIMITS._replace(beside_s=15 * TOKEN_S + 20 * TOKEN_S))
    queue.time.batch_s = 15 * TOKEN_S
    added(queue, "a", 8, 8, 8, 50)
    assert [len(queue.take_batch(0.0, 0.0)) for _ in range(3)] == [2, 1, 1], "an input is computed as a whole"
    assert not queue.take_batch(0.0, 0.0) and queue.num_tokens == 0


def test_where_a_batch_costs_more_than_its_limit_without_inputs_it_has_inputs_for_as_much_again() -> None:
    queue = a_queue(limits=LIMITS._replace(batch_tokens=1000, beside_s=BATCH_S / 2))
    added(queue, "a", *[10] * 50)
    assert len(queue.take_batch(0.0, 0.0)) == round(BATCH_S / TOKEN_S) / 10


def test_beside_answers_a_tenant_in_debt_has_a_quarter_of_its_share_of_the_time_and_waits_for_the_rest() -> None:
    queue, now, computed = a_queue(), 0.0, 0.0
    for tenant in ("debtor", "answered"):
        queue.share.asked(queue.share.account(tenant))
    queue.share.charge(queue.share.account("debtor"), 20.0)
    added(queue, "debtor", *[10] * 10_000)
    while now < 10.0:
        now += 0.01  # a step
        if batch := queue.take_batch(now, queue.share.payback_of("answered")):
            now += 0.01
            computed += sum(queue.measured(batch, 0.01, now).values())
    assert 0.09 < computed / now <= 0.125


def test_nobody_waits_for_others_at_low_load_and_a_burst_is_waited_for_within_its_limit() -> None:
    queue = a_queue()
    assert queue.taken_at(0.0) == float("inf")
    added(queue, "a", 10, at=0.0)
    assert queue.taken_at(0.0) == 0.0, "nothing is known of others"
    queue.take_batch(0.0)
    for at in (1.0, 2.0, 3.0):
        added(queue, "a", 10, at=at)
        assert queue.taken_at(at) == at, "the next is a second away"
        queue.take_batch(0.0)
    for number in range(30):  # a burst, each a twentieth of a batch's fixed cost after the one before
        added(queue, "a", 1, at=4.0 + number * BATCH_S / 20)
    now = 4.0 + 29 * BATCH_S / 20
    assert queue.taken_at(now) == now, "thirty who wait for one more lose more than a batch costs"
    queue.take_batch(0.0)
    added(queue, "a", 1, at=now)
    assert now < queue.taken_at(now) <= now + LIMITS.longest_wait_s
    late = now + LIMITS.longest_wait_s
    assert queue.taken_at(late) == late
    added(queue, "b", 100, at=now)
    assert queue.taken_at(now) == now, "a batch is full"


def test_the_time_of_a_batch_is_learned_as_a_line() -> None:
    time = BatchTime()
    for tokens in (10, 200, 50, 400, 100):
        time.measured(tokens, BATCH_S + TOKEN_S * tokens)
    assert (time.batch_s, time.token_s) == (pytest.approx(BATCH_S), pytest.approx(TOKEN_S))
    assert time.tokens(time.seconds(300)) in (299, 300)
    alike = BatchTime()
    alike.measured(10, 0.1)
    assert alike.seconds(10) == pytest.approx(0.1) and alike.token_s > 0.0


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 120), min_size=1, max_size=8)),
        st.integers(0, 5),  # the request that leaves
        st.booleans(),  # a batch is taken
    ),
    max_size=30,
)


@settings(max_examples=examples(100))
@given(steps)
def test_each_input_is_taken_once_in_order_and_batches_keep_their_bounds(steps: list[object]) -> None:  # noqa: C901
    queue, requests, taken = a_queue(), list[EncodingRequest](), dict[EncodingRequest, list[int]]()
    cancelled, now = set[EncodingRequest](), 0.0

    def take(*, is_beside: bool) -> bool:
        batch = queue.take_batch(now, 0.0 if is_beside else inf)
        tokens = sum(one.request.lengths[one.ordinal] for one in batch)
        assert tokens <= LIMITS.batch_tokens or len(batch) == 1
        for one in batch:
            assert one.request not in cancelled
            taken[one.request].append(one.ordinal)
        if batch:
            assert sum(queue.measured(batch, 0.01, now).values()) == pytest.approx(0.01)
        return bool(batch)

    for step in steps:
        now += 0.001
        if isinstance(step, bool):
            take(is_beside=step)
        elif isinstance(step, int):
            if step < len(requests):
                queue.cancel(requests[step])
                cancelled.add(requests[step])
        elif isinstance(step, tuple):
            requests.append(added(queue, step[0], *step[1], at=now))
            taken[requests[-1]] = []
        open_ = [one for one in requests if one not in cancelled]
        assert queue.num_tokens == sum(sum(one.lengths[len(taken[one]) :]) for one in open_)
    while take(is_beside=False):
        pass
    assert queue.taken_at(now) == float("inf") and queue.num_tokens == 0
    for one in requests:
        assert taken[one] == list(range(len(taken[one]))), "in order, each once"
        assert one in cancelled or len(taken[one]) == len(one.lengths)


def test_a_newcomer_waits_for_its_own_tenants_backlog_and_as_much_of_each_other_by_weight() -> None:
    queue = a_queue({"heavy": 3.0})
    added(queue, "flood", *[10] * 90)
    newcomer = EncodingRequest("light", [10], 0.0)
    assert queue.wait_s(newcomer) == pytest.approx(BATCH_S + 20 * TOKEN_S), "nine hundred tokens are not before it"
    added(queue, "heavy", *[5] * 20)
    assert queue.wait_s(newcomer) == pytest.approx(BATCH_S + 50 * TOKEN_S)
    assert queue.wait_s(EncodingRequest("flood", [10], 0.0)) == pytest.approx(11 * BATCH_S + 1010 * TOKEN_S)


def test_while_the_limit_is_reached_a_tenant_has_its_part_and_one_with_nothing_waiting_may_wait() -> None:
    queue = a_queue()
    added(queue, "flood", *[100] * 10)
    assert not queue.fits(EncodingRequest("flood", [1], 0.0))
    assert queue.fits(EncodingRequest("light", [500], 0.0))
    added(queue, "light", 400)
    assert queue.fits(EncodingRequest("light", [100], 0.0)) and not queue.fits(EncodingRequest("light", [101], 0.0))
    assert not queue.fits(EncodingRequest("huge", [1001], 0.0))

"""Orders as their papers and textbooks define them, by worked examples."""

from collections.abc import Callable

import pytest

import labs.orderings.published  # noqa: F401 - adds orders
from admission.backlog import Backlog
from admission.core import ORDERS, PRIOR_STEP_TIME, CoreConfig, OrderParts
from admission.ledger import EngineTimeTariff, Tariffs
from admission.order import WaitingOrder
from admission.output_length import OutputLengths
from admission.share import Share
from admission.step_times.step_time import StepTimeModel
from backend.config import EngineConfig
from backend.scheduler.sequence import FinishReason, Sequence
from labs.orderings.learned_rank import LearnedRank
from labs.orderings.length_groups import LengthGroups
from labs.orderings.length_predictor import MIN_ANSWERS
from labs.orderings.magnus import MAX_WASTED_TOKENS, Magnus
from labs.orderings.ordering import Ordering, PublishedOrder
from labs.orderings.response_ratio import HighestResponseRatioNext
from tests.backend.sequences import make_sequence
from tests.labs.orderings.queues import drain, head_of


def by_name(values: dict[str, float]) -> Callable[[Sequence], float]:
    return lambda sequence: values[sequence.id]


def skip(ordering: Ordering, steps: int) -> None:
    for _ in range(steps):
        ordering.set_time(0.0)


def test_learned_rank_promotes_whom_200_steps_passed_over_and_ranks_the_promoted_among_themselves() -> None:
    """vllm-ltr, algorithm 1, with its threshold of starvation."""
    ordering = LearnedRank(by_name({"longest": 900.0, "long": 500.0, "short": 10.0, "shorter": 5.0}))
    ordering.add(make_sequence("longest"))
    skip(ordering, 1)
    ordering.add(make_sequence("long"))
    ordering.add(make_sequence("short"))
    assert head_of(ordering).id == "short"
    ordering.remove(head_of(ordering))
    skip(ordering, 198)
    ordering.add(make_sequence("shorter"))
    assert head_of(ordering).id == "shorter"
    skip(ordering, 1)
    assert drain(ordering) == ["longest", "shorter", "long"]


def test_one_plan_serves_one_group_and_the_oldest_of_all_chooses_it() -> None:
    ordering = LengthGroups()
    for number, (name, prompt) in enumerate({"a": 9, "b": 100, "c": 15, "d": 8, "e": 17}.items()):
        ordering.add(make_sequence(name, prompt=prompt, arrival=float(number)))
    ordering.set_time(5.0)
    assert drain(ordering)[:3] == ["a", "c", "d"], "8 to 15 tokens"


def order_of(name: str) -> WaitingOrder:
    tariffs = Tariffs([EngineTimeTariff(StepTimeModel(PRIOR_STEP_TIME))])
    backlog, engine = Backlog(tariffs.estimate, shares_blocks=False), EngineConfig(num_blocks=64, max_model_len=1024)
    return ORDERS[name](OrderParts(CoreConfig(), engine, Share(), OutputLengths(), tariffs, backlog))


def test_the_earliest_deadline_goes_first_and_without_one_it_is_due_by_its_class() -> None:
    order = order_of("earliest_deadline")
    for name, due in {"latest": 25.0, "soon": 2.0, "of no class": None, "later": 9.0}.items():
        order.add(make_sequence(name, first_token_by=due))
    assert drain(order) == ["soon", "later", "of no class", "latest"]


def test_least_laxity_serves_what_must_begin_first_though_another_is_due_first() -> None:
    """A prompt of 10,000 tokens takes more than half a second by the step times before any was measured."""
    order = order_of("least_laxity")
    order.add(make_sequence("due first", first_token_by=5.0))
    order.add(make_sequence("must begin first", prompt=10_000, first_token_by=5.4))
    assert drain(order) == ["must begin first", "due first"]


def test_every_published_order_is_one_of_the_registry() -> None:
    for name in ORDERS:
        order = order_of(name)
        order.add(make_sequence(name))
        assert drain(order) == [name]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.CANCELLED])
def test_lengths_are_learned_from_answers_that_are_complete(reason: FinishReason) -> None:
    order = order_of("response_ratio")
    for number in range(MIN_ANSWERS):
        ended = make_sequence(str(number), output=100)
        ended.output, ended.finish_reason = [7] * 30, reason
        order.ended(ended)
    assert isinstance(order, PublishedOrder) and order.predicted is not None
    assert order.predicted.output(make_sequence("next", output=100)) == (30.0 if reason is FinishReason.STOP else 0.0)


def test_the_response_ratio_serves_the_short_until_the_long_has_waited_for_as_many_times_its_service() -> None:
    """Brinch Hansen's (waited + service) / service: at 12 it is 2.2 for ten seconds of service, and 2 for two."""
    ordering = HighestResponseRatioNext(by_name({"long": 10.0, "short": 2.0}))
    ordering.add(make_sequence("long", arrival=0.0))
    ordering.add(make_sequence("short", arrival=10.0))
    ordering.set_time(12.0)
    assert head_of(ordering).id == "long"
    ordering.set_time(13.0)
    assert head_of(ordering).id == "short"


def magnus(outputs: dict[str, float], kv_tokens: int = 100_000, most: int = 64) -> Magnus:
    return Magnus(by_name(outputs), by_name(outputs), kv_tokens, most)


def batches_of(ordering: Magnus, now: float = 0.0) -> list[list[str]]:
    """Returns whom each plan admits."""
    batches = []
    while len(ordering):
        ordering.set_time(now)
        batches.append([])
        while (head := ordering.head()) is not None:
            batches[-1].append(head.id)
            ordering.remove(head)
    return batches


def test_magnus_batches_requests_that_waste_little_memory_together() -> None:
    """Beside an answer of 500 one of 100 wastes 400 reads of 100 + 300 tokens and more: 120,100, beyond the authors'
    50,000; one of 450 wastes 50 reads of 575 and more.
    """
    ordering = magnus({"long": 500.0, "short": 100.0, "nearly": 450.0, "shorter": 90.0})
    for number, name in enumerate(("long", "short", "nearly", "shorter")):
        ordering.add(make_sequence(name, prompt=100, arrival=float(number)))
    assert sorted(map(sorted, batches_of(ordering))) == [["long", "nearly"], ["short", "shorter"]]
    assert 400 * (100 + (101 + 500) / 2) > MAX_WASTED_TOKENS > 50 * (100 + (451 + 500) / 2)

from admission.share import Share
from labs.orderings.virtual_finish import VirtualFinishWithBoost
from tests.backend.sequences import make_sequence
from tests.labs.orderings.queues import drain, head_of, size


def test_the_boost_turns_the_order_around_after_3_3_times_its_seconds() -> None:
    ordering = VirtualFinishWithBoost(Share(), size, boost=0.3, boost_seconds=10.0)
    ordering.add(make_sequence("small", prompt=1))
    ordering.add(make_sequence("large", prompt=50))
    ordering.set_time(33.0)
    assert head_of(ordering).id == "small"
    ordering.set_time(34.0)
    assert head_of(ordering).id == "large"


def test_virtual_finish_lets_one_tenant_of_many_small_requests_pass_another() -> None:
    ordering = VirtualFinishWithBoost(Share(), size)
    ordering.add(make_sequence("patient", "light", prompt=10))
    for number in range(5):
        ordering.add(make_sequence(f"flood{number}", "heavy", prompt=9))
    assert drain(ordering)[-1] == "patient"

from admission.orderings.by_key import EarliestDeadlineFirst, ShortestPredictedFirst
from tests.admission.orderings.queues import drain, head_of, size
from tests.backend.sequences import make_sequence


def test_shortest_first_starves_the_long() -> None:
    ordering = ShortestPredictedFirst(size)
    ordering.add(make_sequence("long", prompt=100))
    for number in range(5):
        ordering.add(make_sequence(f"short{number}", arrival=number + 1.0))
        head = head_of(ordering)
        assert head.id == f"short{number}"
        ordering.remove(head)


def test_a_prediction_is_asked_for_once_and_survives_a_preemption() -> None:
    asked: list[str] = []
    ordering = ShortestPredictedFirst(lambda s: float(asked.append(s.id) or len(asked)))
    first, second = make_sequence("first"), make_sequence("second")
    ordering.add(first)
    ordering.add(second)
    ordering.remove(first)
    ordering.restore(first)
    assert ordering.head() is first and asked == ["first", "second"]


def test_the_earliest_deadline_goes_first_and_the_late_wait_behind_all_others() -> None:
    deadlines = {"soon": 2.0, "later": 9.0, "latest": 12.0}
    ordering = EarliestDeadlineFirst(lambda s: deadlines[s.id])
    for name in ("latest", "later", "soon"):
        ordering.add(make_sequence(name))
    assert head_of(ordering).id == "soon"
    ordering.at(5.0)
    assert drain(ordering) == ["later", "latest", "soon"]

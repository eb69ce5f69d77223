from labs.orderings.shortest_first import ShortestFirst
from tests.backend.sequences import make_sequence
from tests.labs.orderings.queues import head_of, size


def test_shortest_first_starves_the_long() -> None:
    ordering = ShortestFirst(size)
    ordering.add(make_sequence("long", prompt=100))
    for number in range(5):
        ordering.add(make_sequence(f"short{number}", arrival=number + 1.0))
        head = head_of(ordering)
        assert head.id == f"short{number}"
        ordering.remove(head)


def test_a_prediction_is_asked_for_once_and_survives_a_preemption() -> None:
    asked: list[str] = []
    ordering = ShortestFirst(lambda s: float(asked.append(s.id) or len(asked)))
    first, second = make_sequence("first"), make_sequence("second")
    ordering.add(first)
    ordering.add(second)
    ordering.remove(first)
    ordering.restore(first)
    assert ordering.head() is first and asked == ["first", "second"]

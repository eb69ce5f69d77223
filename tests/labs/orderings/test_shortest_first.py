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

from admission.order import WaitingOrder
from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Ordering


def size(sequence: Sequence) -> float:
    return float(sequence.num_prompt_tokens + sequence.request.max_tokens)


def drain(ordering: Ordering | WaitingOrder, now: float = 0.0) -> list[str]:
    """Admits all that wait, by as many plans at `now` as it takes where an order serves a part of them in each."""
    names = []
    while len(ordering):
        if ordering.head() is None:
            ordering.set_time(now)
        head = head_of(ordering)
        names.append(head.id)
        ordering.remove(head)
    return names


def head_of(ordering: Ordering | WaitingOrder) -> Sequence:
    head = ordering.head()
    assert head is not None
    return head

from admission.orderings.ordering import Ordering
from backend.scheduler.sequence import Sequence


def size(sequence: Sequence) -> float:
    return float(len(sequence.prompt) + sequence.max_tokens)


def drain(ordering: Ordering) -> list[str]:
    names = []
    while (head := ordering.head()) is not None:
        names.append(head.id)
        ordering.remove(head)
    return names


def head_of(ordering: Ordering) -> Sequence:
    head = ordering.head()
    assert head is not None
    return head

"""Who was told to come back when: whether clients that come back keep to it."""

from bisect import bisect_right, insort
from collections import OrderedDict

MOST_CLIENTS = 4096
MOST_EACH = 64


class RetryMemory:
    """Requests carry no name by which their next attempt could be known, so attempts are matched by key and number.

    Bounded: whoever was told longest ago is forgotten first. Moments on one clock, in seconds.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[tuple[str, int], list[float]] = OrderedDict()

    def told(self, key: str, retries: int, due: float) -> None:
        """A request with this key, after so many retries, may come again from `due` on."""
        moments = self._due.setdefault((key, retries), [])
        self._due.move_to_end((key, retries))
        insort(moments, due)
        if len(moments) > MOST_EACH:
            del moments[0]
        if len(self._due) > MOST_CLIENTS:
            self._due.popitem(last=False)

    def came(self, key: str, retries: int, now: float) -> bool | None:
        """Whether an attempt after so many retries comes when it may; None: it was not told anything.

        Where several may be meant, it is the one that was due last of those that are due.
        """
        moments = self._due.get((key, retries - 1))
        if not moments:
            return None
        is_due = bisect_right(moments, now)
        del moments[max(0, is_due - 1)]
        if not moments:
            del self._due[key, retries - 1]
        return is_due > 0

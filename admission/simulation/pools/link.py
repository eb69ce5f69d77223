"""The link over which one pool's keys and values reach the other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """All transfers share it, first come, first served: one that is alone has all of its bandwidth."""

    bytes_per_second: float
    latency: float = 0.0  # seconds, beside the transfer itself

    def seconds(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_second


class LinkUse:
    """The transfers over a link, in the order in which they are ready."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_at = 0.0
        self.busy = 0.0  # seconds
        self.waited = 0.0  # seconds, of all transfers for those before them

    def transfer(self, num_bytes: float, ready: float) -> float:
        """Returns when it has arrived."""
        begin, seconds = max(ready, self._free_at), self._link.seconds(num_bytes)
        self._free_at = begin + seconds
        self.busy += seconds
        self.waited += begin - ready
        return begin + seconds + self._link.latency

"""The link that carries the keys and values of prompts off a device."""

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Generic, NamedTuple, TypeVar

Transfer = TypeVar("Transfer")


@dataclass(frozen=True, slots=True)
class Link:
    """The bandwidth of each prefill device, and the latency of a transfer."""

    bytes_per_second: float
    latency: float = 0.0  # seconds, overlapped with later transfers

    def seconds(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_second


class _Waiting(NamedTuple):
    ready: float
    num_bytes: float


class LinkQueue(Generic[Transfer]):
    """The transfers over one device's link: one after another at its full bandwidth, first come, first served."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[Transfer, _Waiting] = {}
        self._sent: deque[tuple[float, Transfer]] = deque()  # transfers under way, with their arrivals
        self._free_at = 0.0
        self.busy = 0.0  # seconds
        self.waited = 0.0  # seconds, of all transfers behind earlier ones
        self.num_begun = 0

    @property
    def next_at(self) -> float:
        """The arrival of the next transfer; inf: none is under way."""
        return self._sent[0][0] if self._sent else inf

    def add(self, transfer: Transfer, num_bytes: float, now: float) -> None:
        """Send `num_bytes` behind the waiting transfers."""
        self._begin(now)
        self._waiting[transfer] = _Waiting(now, num_bytes)
        self._begin(now)

    def withdraw(self, transfer: Transfer, now: float) -> bool:
        """Withdraw a waiting transfer; returns False once it has begun."""
        self._begin(now)
        return self._waiting.pop(transfer, None) is not None

    def arrived(self, now: float) -> list[Transfer]:
        """The transfers that have arrived by now, in the order of sending."""
        self._begin(now)
        arrived = []
        while self._sent and self._sent[0][0] <= now:
            arrived.append(self._sent.popleft()[1])
        return arrived

    def _begin(self, now: float) -> None:
        """Begin the transfers due by now, each at the end of its predecessor."""
        while self._waiting and self._free_at <= now:
            transfer = next(iter(self._waiting))
            ready, num_bytes = self._waiting.pop(transfer)
            begin, seconds = max(ready, self._free_at), self._link.seconds(num_bytes)
            self._free_at = begin + seconds
            self._sent.append((self._free_at + self._link.latency, transfer))
            self.busy += seconds
            self.waited += begin - ready
            self.num_begun += 1

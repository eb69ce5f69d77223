"""Prompts and answers on devices of their own, in one time: memory in both pools, and transfers on the links."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from admission.core import Overload
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.pools.link import Link, LinkQueue
from labs.simulation.pools.replica import REFUSED, AnswerTimes, HalfReplica, Told, decode_replica

EVERYONE = "everyone"  # the only tenant of the decode pool, which keeps the prefill pool's order


@dataclass(eq=False, slots=True)
class _Handover:
    """A request with a first token, until its keys and values have arrived."""

    number: int
    num_bytes: float
    source: HalfReplica
    link: LinkQueue["_Handover"]
    target: HalfReplica
    has_memory: bool = False  # in the decode pool
    is_cancelled: bool = False  # while it was sent


class TwoPools:
    """Serves requests by prefill devices and decode devices. Deterministic.

    A request keeps its memory in the first pool until its keys and values have arrived, and they are sent only once it
    has all the memory that they need in the second: each pool can hold the other up. A cancelled request's memory is
    free on both sides at once, or after a transfer under way. If another tenant's prompt finds no memory, prompts that
    wait for transfer are evicted, and sent from the host's copy.
    """

    def __init__(self, prefill: int, decode: int, policy: SimulatedPolicy, device: Device, link: Link) -> None:
        assert device.kv_bytes_per_token is not None
        self._token_bytes = device.kv_bytes_per_token
        self._max_model_len = policy.engine.max_model_len
        self._expires = policy.core.overload is Overload.DEADLINE
        self.links = [LinkQueue[_Handover](link) for _ in range(prefill)]
        self.first = [HalfReplica(policy, device, began=self._begun_by(number)) for number in range(prefill)]
        self.second = [decode_replica(policy, device, self._admitted) for _ in range(decode)]
        self._requests: dict[int, Arrival] = {}
        self._begun: dict[int, float] = {}  # times of first tokens
        self._moving: dict[int, _Handover] = {}
        self._expiring: list[tuple[float, int]] = []  # heap

    def run(self, requests: Sequence[Arrival]) -> float:
        """Serve all requests, sorted by time and numbered by session; returns the end of the last step, in seconds."""
        for request in requests:
            self.advance(request.time)
            self.give(request)
        self.advance(inf)
        return self.end()

    def give(self, request: Arrival) -> None:
        """Add a request that arrives at the time of the last advance."""
        self._requests[request.session] = request
        if request.most_tokens > self._max_model_len:
            return  # it is refused
        wanted = [seconds for seconds in (request.deadline, request.done_within) if seconds is not None]
        tokens = min(2, request.output_tokens)  # the second is never computed here
        first = request._replace(
            output_tokens=tokens,
            max_tokens=tokens,
            interval=None,
            deadline=min(wanted, default=None),
            done_within=None,
        )
        if self._expires and request.done_within is not None:
            heappush(self._expiring, (request.time + request.done_within, request.session))
        min(self.first, key=lambda one: (one.tokens_to_prefill, one.num_unfinished)).give(first)

    def advance(self, until: float) -> None:
        """Process all events until a time, in order."""
        while (now := self.next_at) <= until and now < inf:
            for replica in (*self.first, *self.second):
                if replica.next_at <= now:
                    replica.advance(now)
                    self._take_lost(replica, now)
            for link in self.links:
                for handover in link.arrived(now):
                    self._arrived(handover, now)
            while self._expiring and self._expiring[0][0] <= now:
                self.cancel(heappop(self._expiring)[1], now)

    @property
    def next_at(self) -> float:
        """The time of the next event; inf: none."""
        expiring = self._expiring[0][0] if self._expiring else inf
        at_devices = min(replica.next_at for replica in (*self.first, *self.second))
        return min(expiring, at_devices, *(link.next_at for link in self.links))

    def cancel(self, number: int, now: float) -> None:
        """End a request in any state; does nothing after its end."""
        handover = self._moving.get(number)
        if handover is None:
            for replica in (*self.first, *self.second):
                replica.cancel(number, now)
        elif handover.has_memory and not handover.link.withdraw(handover, now):
            handover.is_cancelled = True
        else:
            self._release(handover, now)

    def end(self) -> float:
        """Returns when the last step ended, in seconds."""
        return max(replica.end() for replica in (*self.first, *self.second))

    @property
    def answers(self) -> dict[int, AnswerTimes]:
        """The times of answers, by number; the last token of a cut answer is None."""
        found = {number: AnswerTimes(first, None) for number, first in self._begun.items()}
        for replica in self.first:
            found |= {number: one for number, one in replica.answers.items() if number not in self._begun}
        for replica in self.second:
            found |= {number: AnswerTimes(self._begun[number], one.last) for number, one in replica.answers.items()}
        return {number: found.get(number, REFUSED) for number in self._requests}

    def _begun_by(self, place: int) -> Told:
        def begun(number: int, now: float) -> None:
            request = self._requests[number]
            self._begun[number] = now
            target = min(self.second, key=lambda one: one.num_unfinished)
            num_bytes = request.prompt_tokens * self._token_bytes
            self._moving[number] = _Handover(number, num_bytes, self.first[place], self.links[place], target)
            target.give(_as_decode(request, now))

        return begun

    def _admitted(self, number: int, now: float) -> None:
        handover = self._moving[number]
        handover.has_memory = True
        handover.link.add(handover, handover.num_bytes, now)

    def _arrived(self, handover: _Handover, now: float) -> None:
        if handover.is_cancelled:
            self._release(handover, now)
            return
        del self._moving[handover.number]
        handover.source.cancel(handover.number, now)
        handover.target.go_on(handover.number, now)

    def _take_lost(self, replica: HalfReplica, now: float) -> None:
        """Free the transfers that lost their prefill memory to another tenant's prompt; they are sent from the host's
        copy.
        """
        for number in replica.take_lost():
            handover = self._moving.get(number)
            if handover is not None and handover.source is replica:
                replica.cancel(number, now)

    def _release(self, handover: _Handover, now: float) -> None:
        del self._moving[handover.number]
        handover.source.cancel(handover.number, now)
        handover.target.cancel(handover.number, now)


def _as_decode(request: Arrival, now: float) -> Arrival:
    """A request for the decode pool, which copies its first token. Its client's patience is over, and it is judged with
    all others.
    """
    return request._replace(
        time=now,
        tenant=EVERYONE,
        priority_class=0,
        max_tokens=request.declared_tokens,
        interval=None,
        deadline=None,
        done_within=None,
        patience=inf,
        content=None,
    )

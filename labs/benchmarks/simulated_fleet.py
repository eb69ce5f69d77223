"""A fleet in simulation: the router's own picker before replicas that run the core and tell their own states."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import labs.routings  # noqa: F401 - adds ways to pick
from admission.promise import Promise
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.sequence import Sequence as Running
from fleet.fleet import Fleet
from fleet.picker import PICKERS, Knowledge, Routing
from fleet.prediction import RoutedRequest
from fleet.prefix_map import PrefixMap
from fleet.view import OpenRequest, ReplicaAddress, ReplicaView
from gateway.replica.digests import BLOCK_BYTES, MAX_BLOCKS
from gateway.replica.fleet_secret import Beginnings
from gateway.replica.reader import ReplicaReader
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.recorder import Objective, PlannedWork, Recorder, TrackedRequest

POLL = 0.1  # seconds between two states of a replica
BYTES_PER_TOKEN = 4  # of prompts


@dataclass(eq=False, slots=True)
class Routed:
    """One request, its replica and its result; moments are in seconds of the run."""

    arrival: Arrival
    request: RoutedRequest
    view: ReplicaView | None = None
    open: OpenRequest | None = None
    first: float | None = None  # when its first token came
    cached: int = 0  # tokens of its prompt that were found

    @property
    def seconds(self) -> float:
        """The time to its first token."""
        assert self.first is not None, "nobody is refused"
        return self.first - self.arrival.time


class _Watcher(Recorder):
    """Tells the fleet when a request's first token has come, and when it has ended."""

    def __init__(self, device: Device, fleet: "SimulatedFleet") -> None:
        super().__init__(device, Objective(), {})
        self._fleet = fleet
        self._routed: dict[Running, Routed] = {}

    def queued(self, sequence: Running, arrival: Arrival, promise: Promise) -> None:
        super().queued(sequence, arrival, promise)
        self._routed[sequence] = self._fleet.arriving

    def completed(self, work: PlannedWork, elapsed: float, new_tokens: Sequence[NewToken], now: float) -> None:
        for sequence, _, _ in new_tokens:
            if len(sequence.output) == 1 and (routed := self._routed[sequence]).first is None:
                routed.first, routed.cached = now, sequence.num_cached_tokens
                self._fleet.began(routed)
        super().completed(work, elapsed, new_tokens, now)

    def _done(self, sequence: Running, request: TrackedRequest, now: float) -> None:
        super()._done(sequence, request, now)
        self._fleet.ended(self._routed.pop(sequence), sequence)


class _Replica:
    def __init__(self, fleet: "SimulatedFleet", policy: SimulatedPolicy, device: Device) -> None:
        core = policy.make_core()
        self.recorder = _Watcher(device, fleet)
        self.loop = Loop(core, device, self.recorder, policy.engine.max_model_len, target=policy.target)
        self.reader = ReplicaReader("simulated", core, 1.0, lambda: fleet.now)


class SimulatedFleet:
    """Replicas behind one router, which sees of each what it told last, at most `POLL` seconds ago. Deterministic."""

    def __init__(self, replicas: int, routing: Routing, policy: SimulatedPolicy, device: Device, seed: int) -> None:
        self.now = 0.0
        knowledge = Knowledge(PrefixMap(), lambda _: 1.0)
        self._fleet = Fleet(PICKERS[routing](knowledge, Random(seed)), knowledge, lambda: self.now)
        self._fleet.set_replicas(ReplicaAddress(f"http://10.0.0.{n}:80", "") for n in range(1, replicas + 1))
        self._replicas = {name: _Replica(self, policy, device) for name in self._fleet.views}
        self.arriving: Routed  # while its replica takes it

    def run(self, arrivals: Iterable[Arrival]) -> list[Routed]:
        """Serve all requests, and return their results; arrivals are in order of time."""
        routed = []
        for arrival in _among_polls(arrivals, self._poll):
            self._advance(arrival.time)
            routed.append(self._route(arrival))
        while any(one.first is None for one in routed):
            self._advance(self.now + 10.0)
        return routed

    @property
    def imbalance(self) -> float:
        """The seconds in which the busiest replica computed, by the mean."""
        busy = [replica.recorder.busy for replica in self._replicas.values()]
        return max(busy) * len(busy) / sum(busy)

    def began(self, routed: Routed) -> None:
        assert routed.view is not None
        self._fleet.answered(routed.request, routed.view)

    def ended(self, routed: Routed, sequence: Running) -> None:
        assert routed.view is not None and routed.open is not None
        routed.view.ended(routed.open)
        told = Beginnings(routed.request.digests, routed.request.num_bytes)
        self._replicas[routed.view.name].reader.beginnings.computed(told, sequence)

    def _advance(self, now: float) -> None:
        self.now = now
        for replica in self._replicas.values():
            replica.loop.advance(now)

    def _poll(self, now: float) -> None:
        self._advance(now)
        for view in self._fleet.views.values():
            state = self._replicas[view.name].reader.state(draining=False, since=view.next_event)
            self._fleet.told(view, state, asked=now)

    def _route(self, arrival: Arrival) -> Routed:
        request = RoutedRequest(arrival.tenant, arrival.prompt_tokens * BYTES_PER_TOKEN, digests_of(arrival))
        view = self._fleet.pick(request)
        assert view is not None
        self.arriving = Routed(arrival, request, view, self._fleet.sent(request, view))
        loop = self._replicas[view.name].loop
        loop.expect([arrival])
        loop.advance(self.now)
        return self.arriving


def _among_polls(arrivals: Iterable[Arrival], poll: Callable[[float], object]) -> Iterator[Arrival]:
    due = 0.0
    for arrival in arrivals:
        while due <= arrival.time:
            poll(due)
            due += POLL
        yield arrival


def digests_of(arrival: Arrival) -> tuple[bytes, ...]:
    """Return digests of a prompt's beginnings, as a router would have them of its bytes: its tenant's alone."""
    tokens = BLOCK_BYTES // BYTES_PER_TOKEN
    ends = range(tokens, min(arrival.prompt_tokens, tokens * MAX_BLOCKS) + 1, tokens)
    content = arrival.content
    found = []
    for end in ends:
        unit = None if content is None else content.id_at(end - 1)
        known = f"{arrival.key}" if unit is None else f"#{unit}"
        found.append(f"{arrival.tenant} {known} {end}".encode())
    return tuple(found)

"""The replicas of a router: membership, failures and states."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from fleet.picker import Knowledge, Picker
from fleet.prediction import RoutedRequest, own_prefill
from fleet.view import OpenRequest, ReplicaAddress, ReplicaView
from gateway.replica.state import Changes, ReplicaState, WaitingWork

log = logging.getLogger(__name__)

MAX_SHARE_LEFT_OUT = 0.5  # of the replicas, ejected at once
LEARNED_AT_ONCE = 2000  # cached beginnings: two milliseconds


class Fleet:
    """Owned by the event loop; `clock` is in seconds."""

    def __init__(self, picker: Picker, knowledge: Knowledge, clock: Callable[[], float]) -> None:
        self.views: dict[str, ReplicaView] = {}  # by name
        self.clock = clock
        self.has_heard = False  # of any replica's state, since the start
        self.num_attempts = 0  # at all replicas ever known
        self._picker, self._knowledge, self._prefixes = picker, knowledge, knowledge.prefixes

    def set_replicas(self, replicas: Iterable[ReplicaAddress]) -> None:
        """Choose among these replicas from now on. Open requests to others go on."""
        before, named = self.views, {one.name: one for one in replicas}
        kept = {name: before.get(name) for name in named}
        self.views = {
            name: old if old is not None and old.replica == named[name] else ReplicaView(named[name])
            for name, old in kept.items()
        }
        for name in before.keys() - named.keys():
            self._prefixes.forget(name)

    def available(self, besides: Collection[str] = (), among: Callable[[str], bool] | None = None) -> list[ReplicaView]:
        """The replicas available to new requests, without those in `besides`, and within `among`.

        Silence of all replicas, or failures of more than `MAX_SHARE_LEFT_OUT` of them, have a common cause and exclude
        no replica.
        """
        now = self.clock()
        views = [view for view in self.views.values() if view.takes_requests]
        views = [view for view in views if not view.is_silent(now)] or views
        good = [view for view in views if not view.ejection.is_out(now)]
        chosen = views if len(views) - len(good) > MAX_SHARE_LEFT_OUT * len(views) else good
        return [view for view in chosen if view.name not in besides and (among is None or among(view.name))]

    def pick(
        self, request: RoutedRequest, besides: Collection[str] = (), among: Callable[[str], bool] | None = None
    ) -> ReplicaView | None:
        """The replica for a request; None if none is available. Arguments are as in `available`."""
        views = self.available(besides, among)
        return self._picker.pick(request, views, self.clock()) if views else None

    def earliest(self, request: RoutedRequest, among: Callable[[str], bool] | None = None) -> ReplicaView | None:
        """The replica with the earliest predicted first token, without regard to the delay of other requests; None if
        none is available. `among` is as in `available`.
        """
        return min(self.available(among=among), key=lambda view: self.first_token(request, view), default=None)

    def first_token(self, request: RoutedRequest, view: ReplicaView) -> float:
        """The predicted seconds until the first token of a replica with a state."""
        return self._knowledge.first_token(request, view, self.clock())

    @contextmanager
    def attempt(self, request: RoutedRequest, view: ReplicaView) -> Iterator[OpenRequest]:
        """Count a request as open at the replica while the block runs."""
        self.num_attempts += 1
        view.attempts += 1
        one = self.sent(request, view)
        try:
            yield one
        finally:
            view.ended(one)

    def sent(self, request: RoutedRequest, view: ReplicaView) -> OpenRequest:
        """Count a request as open at the replica, until `view.ended`."""
        assert view.state is not None
        now = self.clock()
        own = own_prefill(request, view.state, self._knowledge.cached_share(request, view, now))
        self._picker.sent(request, view, own, now)
        return view.sent(request.tenant, WaitingWork(1, own, own), now)

    def answered(self, request: RoutedRequest, view: ReplicaView) -> None:
        """Record that an answer has begun: the prompt is computed there."""
        view.ejection.succeeded()
        self._prefixes.learn(view.name, request.digests, self.clock())

    def failed(self, view: ReplicaView, is_unreachable: bool) -> None:
        """Record a failed attempt. An unreachable replica gets no requests before its next state."""
        before = view.ejection.times
        view.ejection.failed(self.clock())
        if view.ejection.times > before:
            log.warning("replica %s is ejected for a while: its requests fail", view.name)
        if is_unreachable:
            self.lost(view)

    def told(self, view: ReplicaView, state: ReplicaState, asked: float) -> None:
        """Take a state polled from a replica at the moment `asked`, with the first part of its cached beginnings."""
        was_silent = view.is_silent(self.clock())
        is_new = view.state is None
        changes, now = state.beginnings, self.clock()
        if view.told(state, asked, now, self._knowledge.weight) or (changes.is_all and not is_new):
            self._prefixes.forget(view.name)
        view.next_event, self.has_heard = changes.next, True
        self.learn(view, changes, 0)
        self._prefixes.evicted(view.name, map(bytes.fromhex, changes.evicted))
        if was_silent:
            log.info("replica %s answers", view.name)

    def learn(self, view: ReplicaView, changes: Changes, first: int) -> None:
        """Learn `LEARNED_AT_ONCE` of a replica's cached beginnings, from the one at `first` on."""
        some = changes.cached[first : first + LEARNED_AT_ONCE]
        behind = {bytes.fromhex(one): num_bytes for one in some if (num_bytes := changes.behind.get(one))}
        self._prefixes.learn(view.name, map(bytes.fromhex, some), self.clock(), behind)

    def silent(self, view: ReplicaView) -> None:
        """Record a failed poll; after a while the replica counts as lost, if others answer."""
        now = self.clock()
        if view.is_silent(now) and not all(other.is_silent(now) for other in self.views.values()):
            self.lost(view)

    def lost(self, view: ReplicaView) -> None:
        """Give up a replica until its next state, with its cache entries and its attempts without an answer."""
        if view.state is None:
            return
        log.warning("replica %s does not answer", view.name)
        view.lost()
        self._prefixes.forget(view.name)

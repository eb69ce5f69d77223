"""The policy that holds now, read from files that an admin edits while the gateway runs."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from gateway.background import tell_all
from gateway.tenants.file_watch import FileWatcher, signature
from quotas.policy.policy import DEFAULT_POLICY, Policy, QueueLimits
from quotas.policy.policy_diff import policy_diff
from quotas.policy.policy_file import PolicyError, PolicyReader, field_places, policy_files, read_sources
from quotas.policy.problems import Mark, Problem

log = logging.getLogger(__name__)

MAX_EDITIONS = 50  # kept
MAX_CHANGE_LINES = 500  # lines of each


Check = Callable[[Policy], Iterable[tuple[str, str]]]
"""Returns fields of a valid policy that this gateway cannot honour, each with the problem."""


def check_policy(policy: Policy, sources: Mapping[str, bytes], checks: Iterable[Check]) -> None:
    """Raise `PolicyError` for the problems that checks find, at the fields' places in the files."""
    found = [problem for check in checks for problem in check(policy)]
    if found:
        places = field_places(sources)
        raise PolicyError(Problem(_place(field, places, sources), field, message) for field, message in found)


def _place(field: str, places: Mapping[str, Mark], sources: Iterable[str]) -> Mark:
    """The place of a field, or of the default that it inherits. A tenant's name may have dots."""
    parts = field.split(".")
    defaults = [".".join(["defaults", *parts[begin:]]) for begin in range(2, len(parts))]
    return next((places[one] for one in [field, *defaults] if one in places), Mark(next(iter(sources), "")))


@dataclass(frozen=True, slots=True)
class Edition:
    """A policy that took effect, and its changes."""

    version: str
    at: float  # Unix seconds
    changes: tuple[str, ...]  # lines of `policy_diff`, the first `MAX_CHANGE_LINES`; none of the first edition


class LivePolicy:
    """Holds the policy in force; `current` is replaced whole, so a reader's earlier one does not change.

    An edit that is not valid changes nothing: `problem` says what is wrong until another edit mends it. Files that
    cannot be read are read again until they can. Raises `PolicyError` when there is no valid policy to begin with.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        """Read a file, a folder of files, or for None the default policy; `clock` gives Unix seconds."""
        self.path = path
        self._reader = PolicyReader()
        self._watcher = FileWatcher(self.files, self.reload, signature(self.files()))  # before they are read
        self.current: Policy = DEFAULT_POLICY if path is None else self._reader.parse(read_sources(path))
        self.problem: PolicyError | None = None
        self.checks: list[Check] = []
        self.num_reloads = 0
        self.num_failures = 0
        self.on_change: list[Callable[[Policy], Awaitable[object]]] = []
        self.on_failure: list[Callable[[PolicyError], Awaitable[object]]] = []
        self.history: deque[Edition] = deque([Edition(self.current.version, clock(), ())], MAX_EDITIONS)
        self._clock = clock
        self._reloading = asyncio.Lock()

    @property
    def has_files(self) -> bool:
        return self.path is not None

    def files(self) -> Iterable[Path]:
        """The policy's files; the path itself while there are none."""
        if self.path is None:
            return ()
        try:
            return policy_files(self.path)
        except PolicyError:
            return (self.path,)

    def require(self, check: Check) -> None:
        """Reject every later policy in which `check` finds a problem. Raises `PolicyError` for the present one."""
        check_policy(self.current, {} if self.path is None else read_sources(self.path), [check])
        self.checks.append(check)

    async def follow(self) -> None:
        """Apply edits for as long as the server runs, including those since the files were first read."""
        await self._watcher.run()

    async def reload(self) -> None:
        """Read the files again. Reloads are serialized: listeners learn of each policy in the order of reading."""
        assert self.path is not None, "the default policy has no files"
        async with self._reloading:
            await self._reload(self.path)

    async def changes(self, sources: Mapping[str, bytes]) -> tuple[str, ...]:
        """The changes that the policy of these files would make. Raises `PolicyError`."""
        async with self._reloading:  # the reader keeps what it has read, so that a reload of the same is cheap
            _, changes = await asyncio.to_thread(self._parse, sources)
        return changes

    async def _reload(self, path: Path) -> None:
        try:
            sources = await asyncio.to_thread(read_sources, path)
        except PolicyError as error:
            self._watcher.read_again()
            if str(error) != str(self.problem):
                await self._reject(error)
            return
        try:
            policy, changes = await asyncio.to_thread(self._parse, sources)
        except PolicyError as error:
            await self._reject(error)
            return
        self.problem = None
        if policy.version != self.current.version:
            log.info("policy %s replaces %s", policy.version, self.current.version)
            self.history.append(Edition(policy.version, self._clock(), changes))
            self.current = policy
            self.num_reloads += 1
            await tell_all(self.on_change, policy)

    async def _reject(self, error: PolicyError) -> None:
        self.problem = error
        self.num_failures += 1
        log.error("the edited policy is not valid; version %s stays in force:\n%s", self.current.version, error)
        await tell_all(self.on_failure, error)

    def _parse(self, sources: Mapping[str, bytes]) -> tuple[Policy, tuple[str, ...]]:
        """The policy of these files, and its changes. Raises `PolicyError`."""
        policy = self._reader.parse(sources)
        if policy is self.current:
            return policy, ()
        check_policy(policy, sources, self.checks)
        return policy, tuple(policy_diff(self.current, policy, MAX_CHANGE_LINES))


def scheduling_policy(policy: Policy) -> SchedulingPolicy:
    """The scheduler's part of a policy: weights, classes and bounds of the queue.

    A tenant with the unnamed tenants' weight is left out, unless an unnamed one may queue fewer requests.
    """
    others = policy.default
    weight, is_bounded = others.weight, others.queued_requests is not None
    weights, waiting = dict[str, float](), dict[str, int]()
    for name, one in chain(policy.tenants.items(), [(others.name, others)]):
        if is_bounded or one.weight != weight or one is others:
            weights[name] = one.weight
        if one.queued_requests is not None:
            waiting[name] = one.queued_requests
    return SchedulingPolicy(
        weights=weights,
        offsets=tuple(level.aging for level in policy.classes),
        bounds=tuple(_bounds(level.queue) for level in policy.classes),
        may_wait=waiting,
    )


def _bounds(queue: QueueLimits) -> QueueBounds:
    return QueueBounds(queue.requests, queue.tokens, queue.bytes, queue.seconds)

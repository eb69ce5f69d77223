"""The policy that holds now, read from files that an admin edits while the gateway runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from quotas.default_policy import DEFAULT_POLICY
from quotas.policy import Policy
from quotas.policy_file import PolicyError, policy_files, read_policy

log = logging.getLogger(__name__)


class Policies:
    """`current` is replaced whole; whoever has taken it keeps what it took.

    An edit that is not valid changes nothing: `problem` says what is wrong until another edit mends it. Raises
    `PolicyError` when there is no valid policy to begin with.
    """

    def __init__(self, path: Path | None) -> None:
        """A file, a folder of files, or None for the default policy."""
        self._path = path
        self.current: Policy = DEFAULT_POLICY if path is None else read_policy(path)
        self.problem: PolicyError | None = None
        self.num_reloads = 0
        self.num_failures = 0
        self.on_change: list[Callable[[Policy], Awaitable[object]]] = []

    def files(self) -> Iterable[Path]:
        """Those that the policy is read from; the path itself while there are none."""
        if self._path is None:
            return ()
        try:
            return policy_files(self._path)
        except PolicyError:
            return (self._path,)

    async def reload(self) -> None:
        """Read the files again."""
        assert self._path is not None, "the default policy has no files"
        try:
            policy = await asyncio.to_thread(read_policy, self._path)
        except PolicyError as error:
            self.problem = error
            self.num_failures += 1
            log.error("the edited policy is not valid; version %s stays in force:\n%s", self.current.version, error)
            return
        self.problem = None
        if policy.version != self.current.version:
            log.info("policy %s takes the place of %s", policy.version, self.current.version)
            self.current = policy
            self.num_reloads += 1
            for changed in self.on_change:
                await changed(policy)

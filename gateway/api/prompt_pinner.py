"""Keeps the system prompts that a policy pins in the cache: by the names of the blocks that they fill."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from backend.paged_kv.block_names import BlockName
from gateway.api.prompt_names import PromptNames
from gateway.tenants.pinned_prompts import PinnedPrompts
from quotas.policy.policy import Policy


class PinningMemory(Protocol):
    """The engine's view of pinned prefixes."""

    def pin_prefixes(self, tenant: str, names: Collection[BlockName]) -> None: ...


@dataclass(slots=True)
class PinnedPrefix:
    """The tokens that all conversations with one system prompt begin with, as far as they fill blocks."""

    prompt: list[int]
    cache_root: bytes = b""
    block_names: list[BlockName] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    def tokens_at(self, start: int, length: int) -> list[int]:
        return self.prompt[start : start + length]


class PromptPinner:
    """Tells the engine which blocks stay for which tenant, whenever the policy or who shares with whom changes."""

    def __init__(self, memory: PinningMemory, prompts: PinnedPrompts, names: PromptNames | None) -> None:
        """`names`: who names the blocks of requests; None where no block is shared, so that nothing stays."""
        self._memory = memory
        self._prompts = prompts
        self._names = names
        self._pinned: dict[str, list[BlockName]] = {}  # that hold in the engine, of tenants that have any

    async def policy_changed(self, policy: Policy) -> None:
        """Have what this policy pins stay from now on, and nothing else; it is one that `pinned_problems` has passed.

        What is let go of comes first. Prompts become tokens on a thread, and blocks their names a few at a time.
        """
        if self._names is None:
            return
        pinned = {tenant: kept.pinned for tenant, kept in policy.caching.items() if kept.pinned}
        for tenant in sorted(self._pinned):
            if tenant not in pinned:
                self._pin(tenant, [])
        for tenant in sorted(pinned):
            self._pin(tenant, await self._named(pinned[tenant], policy.cache_scope(tenant), self._names))

    async def _named(self, prompts: tuple[str, ...], scope: str, names: PromptNames) -> list[BlockName]:
        """Return the names of these prompts' blocks in a scope, each once, behind that of the block before it."""
        tokens = await asyncio.to_thread(lambda: [list(self._prompts.tokens(prompt)) for prompt in prompts])
        prefixes = [PinnedPrefix(one) for one in tokens]
        names.begin(prefixes, scope, None)
        await names.name(prefixes)
        return list(dict.fromkeys(name for prefix in prefixes for name in prefix.block_names))

    def _pin(self, tenant: str, names: list[BlockName]) -> None:
        if names == self._pinned.get(tenant, []):
            return
        if names:
            self._pinned[tenant] = names
        else:
            del self._pinned[tenant]
        self._memory.pin_prefixes(tenant, names)

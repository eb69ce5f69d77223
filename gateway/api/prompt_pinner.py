"""Keeps the system prompts that a policy pins in the prefix cache, by the names of their full blocks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from admission.admission import Admission
from backend.adapter import Adapter
from backend.paged_kv.block_names import BlockName
from gateway.api.prompt_names import PromptNames
from gateway.tenants.pinned_prompts import PinnedPrompts
from quotas.policy.policy import Policy


@dataclass(slots=True)
class PinnedPrefix:
    """The tokens shared by all conversations with one system prompt, up to the last full block."""

    prompt: list[int]
    cache_root: bytes = b""
    block_names: list[BlockName] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    def tokens_at(self, start: int, length: int) -> list[int]:
        return self.prompt[start : start + length]


class PromptPinner:
    """Tells the engine each tenant's pinned blocks, whenever the policy, the sharing groups or adapters change. A
    prompt is pinned as the tenant's default adapter reads it.
    """

    def __init__(
        self,
        memory: Admission,
        prompts: PinnedPrompts,
        names: PromptNames | None,
        adapter: Callable[[str], Adapter | None] = lambda _: None,
    ) -> None:
        """`names` is None if no blocks are shared, so that nothing can be pinned. `adapter` returns that of a name."""
        self._memory = memory
        self._prompts = prompts
        self._names = names
        self._adapter = adapter
        self._policy: Policy | None = None  # the last one told
        self._pinning = asyncio.Lock()
        self._pinned: dict[str, list[BlockName]] = {}  # present pins in the engine, by tenant

    async def policy_changed(self, policy: Policy) -> None:
        """Replace the pins by this policy's, which `pinned_problems` has passed.

        Blocks no longer pinned are released first. Prompts are tokenized on a thread, and their blocks named a few at a
        time.
        """
        self._policy = policy
        await self.pin_anew()

    async def pin_anew(self, _: object = None) -> None:
        """Replace the pins by the present policy's, as the present adapters read them."""
        async with self._pinning:
            if self._names is None or (policy := self._policy) is None:
                return
            pinned = {tenant: kept.pinned for tenant, kept in policy.caching.items() if kept.pinned}
            for tenant in sorted(self._pinned):
                if tenant not in pinned:
                    self._pin(tenant, [])
            for tenant in sorted(pinned):
                self._pin(tenant, await self._named(pinned[tenant], tenant, policy, self._names))

    async def _named(
        self, prompts: tuple[str, ...], tenant: str, policy: Policy, names: PromptNames
    ) -> list[BlockName]:
        """The names of a tenant's blocks of these prompts, each once, behind its predecessor's."""
        default = policy.tenant(tenant).default_adapter
        adapter = None if default is None else self._adapter(default)
        tokens = await asyncio.to_thread(lambda: [list(self._prompts.tokens(prompt)) for prompt in prompts])
        prefixes = [PinnedPrefix(one) for one in tokens]
        names.begin(prefixes, policy.cache_scope(tenant), None, adapter)
        await names.name(prefixes)
        return list(dict.fromkeys(name for prefix in prefixes for name in prefix.block_names))

    def _pin(self, tenant: str, names: list[BlockName]) -> None:
        if names == self._pinned.get(tenant, []):
            return
        self._memory.pin_prefixes(tenant, names)
        if names:
            self._pinned[tenant] = names
        else:
            del self._pinned[tenant]

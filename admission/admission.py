"""Admission of requests to one engine, as the gateway uses it."""

from collections.abc import Callable, Collection, Iterable, Mapping

from admission.controller import Controller
from admission.request import Asked
from admission.scheduling_policy import SchedulingPolicy
from backend.engine import Engine
from backend.paged_kv.block_names import BlockName
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream

RARELY = 0.9  # the quantile of output lengths that is reserved for an answer of undeclared length


class Admission:
    """Admits requests to one engine. Whoever has one admitted ends it with `leave`, whatever happened."""

    def __init__(self, engine: Engine, core: Controller) -> None:
        self.clock = engine.clock  # seconds
        self._engine = engine
        self._core = core

    def expected_tokens(self, tenant: str, max_tokens: int) -> int:
        """Returns the length in tokens that the tenant's answers rarely exceed."""
        return self._core.lengths.quantile(tenant, max_tokens, RARELY)

    def requested(self, asked: Asked) -> None:
        """Tell the core's observers what was asked of limits, and what they said."""
        self._core.requested(asked, self.clock())

    def admit(self, sequence: Sequence, make_stream: Callable[[Sequence], TokenStream] = TokenStream) -> TokenStream:
        """Queue a sequence and return the stream of its tokens.

        Raises `AdmissionRefused` when it may not be queued, and `DeviceError` when the engine has failed.
        """
        return self._engine.submit(sequence, make_stream)

    def leave(self, stream: TokenStream) -> None:
        """End the stream's sequence if it goes on, as after a disconnect: nobody is left to have its tokens."""
        self._engine.finish(stream.sequence)

    def extend(self, stream: TokenStream, tokens: int) -> None:
        """Let the stream's sequence generate so many tokens more."""
        self._core.extend(stream.sequence, tokens, self.clock())
        self._engine.schedule_soon()

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a tenant, something of which was admitted, for so many seconds of a processor."""
        self._core.charge(tenant, seconds, self.clock())

    def debts_changed(self, served: Mapping[str, float], replicas: int) -> None:
        """Charge tenants for what the others of so many replicas have served them since the last call."""
        self._core.debts_changed(served, replicas, self.clock())

    def policy_changed(self, policy: SchedulingPolicy) -> None:
        """Schedule by this policy from now on."""
        self._core.policy_changed(policy, self.clock())

    def allow(self, tenant: str, blocks: int | None) -> None:
        """Change what the tenant may hold of the KV memory; None: any number of blocks."""
        self._core.allow(tenant, blocks, self.clock())
        self._engine.schedule_soon()

    def limit_cache(self, tenant: str, floor: int, ceiling: int | None) -> None:
        """Keep so many of the tenant's idle cached blocks whatever others need, and at most `ceiling`."""
        self._core.limit_cache(tenant, floor, ceiling, self.clock())
        self._engine.schedule_soon()

    def pin_prefixes(self, tenant: str, names: Collection[BlockName]) -> None:
        """Keep cached blocks of these names for the tenant whatever others need, and of no others."""
        self._core.pin_prefixes(tenant, names, self.clock())
        self._engine.schedule_soon()

    def demand(self, tenant: str) -> int:
        """Returns the blocks that the tenant would hold if it might."""
        return self._core.scheduler.demand(tenant)

    def is_denied(self, tenant: str) -> bool:
        """Returns whether the tenant has waited for more blocks than it may hold, since that was last changed."""
        return tenant in self._core.scheduler.kv_manager.allowances.requested

    def longest_of(self, tenants: Iterable[str]) -> dict[str, int]:
        """Returns for each of the tenants the blocks that its longest sequence may come to need, be it waiting or
        running.
        """
        blocks_for, longest = self._core.scheduler.config.blocks_for, dict.fromkeys(tenants, 0)
        for one in self._engine.sequences:
            if one.tenant in longest:
                longest[one.tenant] = max(longest[one.tenant], blocks_for(one.most_tokens))
        return longest

    def stop(self, stream: TokenStream) -> None:
        """End the stream's sequence: its text has reached a stop string."""
        self._engine.finish(stream.sequence, FinishReason.STOP)

"""The door between a request's scope and the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from admission.output_length import OutputLengths
from admission.request import Asked, Request
from admission.scheduling_policy import SchedulingPolicy
from backend.engine import Engine
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream

RARELY = 0.9  # the quantile of output lengths that is reserved for an answer of undeclared length


class Core(Protocol):
    """What is read of the core that the engine runs."""

    scheduler: Scheduler
    lengths: OutputLengths

    def policy_changed(self, terms: SchedulingPolicy, now: float) -> None: ...

    def asked(self, asked: Asked, now: float) -> None: ...


class Admission:
    """Admits requests to one engine. Entering queues the request, leaving the block ends it, whatever happened."""

    def __init__(self, engine: Engine, core: Core) -> None:
        self.clock = engine.clock  # seconds
        self._engine = engine
        self._core = core

    def expected_tokens(self, tenant: str, max_tokens: int) -> int:
        """The length that the tenant's answers rarely exceed."""
        return self._core.lengths.quantile(tenant, max_tokens, RARELY)

    def asked(self, asked: Asked) -> None:
        """Tell what was asked of limits, and what they said: where the core is recorded, so is this."""
        self._core.asked(asked, self.clock())

    @contextmanager
    def admit(self, request: Request) -> Iterator[TokenStream]:
        """The request's tokens. Raises `Refused` when it may not enter, `DeviceError` when the engine has failed."""
        sequence = Sequence(
            request.id,
            request.tenant,
            request.prompt,
            request.sampling,
            request.max_tokens,
            request.seed,
            request.end_tokens,
            priority_class=request.priority_class,
            token_interval=request.token_interval,
            first_token_target=request.first_token_target,
            first_token_by=request.first_token_by,
            done_by=request.done_by,
            body_bytes=request.body_bytes,
        )
        sequence.limit_to(request.tokens_to_begin_with)
        stream = self._engine.submit(sequence)
        try:
            yield stream
        finally:
            self._engine.finish(sequence)

    def extend(self, stream: TokenStream, tokens: int) -> None:
        """It may generate so many tokens more."""
        self._engine.extend(stream.sequence, tokens)

    def policy_changed(self, terms: SchedulingPolicy) -> None:
        """From now on these terms hold."""
        self._core.policy_changed(terms, self.clock())

    def allow(self, tenant: str, blocks: int | None) -> None:
        """Change what the tenant may hold of the KV memory; None: any number of blocks."""
        self._engine.allow(tenant, blocks)

    def demand(self, tenant: str) -> int:
        """Blocks that the tenant would hold if it might."""
        return self._core.scheduler.demand(tenant)

    def is_denied(self, tenant: str) -> bool:
        """Whether something of the tenant has waited for more blocks than it may hold, since that was last changed."""
        return tenant in self._core.scheduler.holdings.allowances.wanted

    def stop(self, stream: TokenStream) -> None:
        """Its text has reached a stop string: no more tokens are wanted."""
        self._engine.finish(stream.sequence, FinishReason.STOP)

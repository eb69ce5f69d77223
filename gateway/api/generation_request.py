"""What a client asks for, and by when."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from admission.request import Asked, AskedPrompt
from backend.scheduler.sequence import Sequence as EngineSequence
from gateway.api.deadlines import ClientDeadlines
from gateway.openai.requests import GenerationRequest
from quotas.policy.policy import ClassPolicy


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine takes it, and the ids whose text its answer continues."""

    token_ids: list[int]
    tail: Sequence[int]


@dataclass(frozen=True, slots=True)
class GenerationTerms:
    """A request, the class that serves it and how long its client waits; `arrived` in seconds on the engine's clock."""

    request: GenerationRequest
    service_class: ClassPolicy
    deadlines: ClientDeadlines
    arrived: float
    num_bytes: int

    @property
    def done_by(self) -> float | None:
        seconds = self.deadlines.last_token
        return self.arrived + seconds if seconds < inf else None

    @property
    def first_token_by(self) -> float | None:
        """By the client's deadline, and by the target of a class that refuses what would be late."""
        seconds, target = self.deadlines.first_token, self.service_class.ttft
        if self.service_class.when_late == "refuse" and target is not None:
            seconds = min(seconds, target)
        return self.arrived + seconds if seconds < inf else None

    @property
    def token_interval(self) -> float | None:
        promised = self.service_class.time_per_output_token
        if self.deadlines.interval == inf:
            return promised
        return min(self.deadlines.interval, promised or inf)

    def told(
        self,
        request_id: str,
        tenant: str,
        key: str | None,
        sequences: list[EngineSequence],
        refusal: str | None = None,
    ) -> Asked:
        """The same for the record, with what limits said of it."""
        is_declared, deadlines = self.request.sampling.max_tokens is not None, self.deadlines
        return Asked(
            request_id,
            tenant,
            key,
            self.request.service_tier,
            self.num_bytes,
            _known(deadlines.first_token),
            _known(deadlines.last_token),
            _known(deadlines.interval),
            tuple(AskedPrompt(len(one.prompt), one.max_tokens, is_declared) for one in sequences),
            refusal,
        )


def _known(seconds: float) -> float | None:
    return seconds if seconds < inf else None

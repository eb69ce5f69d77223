"""A request to generate text with its deadlines and class, and its prompts as token ids."""

from dataclasses import dataclass
from math import inf

from admission.request import Asked, AskedPrompt
from backend.scheduler.sequence import Sequence
from gateway.api.deadlines import ClientDeadlines
from gateway.openai.requests import GenerationRequest
from quotas.policy.policy import ClassPolicy


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids, and the last of them, whose text the answer continues."""

    token_ids: list[int]
    tail: tuple[int, ...] | list[int]


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """A request, its class of service and its client's deadlines. `arrived` is in seconds of the engine's clock."""

    request: GenerationRequest
    service_class: ClassPolicy
    deadlines: ClientDeadlines
    arrived: float
    num_bytes: int

    @property
    def done_by(self) -> float | None:
        """Returns the moment by which the last token must come; None if the client sets none."""
        seconds = self.deadlines.last_token
        return self.arrived + seconds if seconds < inf else None

    @property
    def first_token_by(self) -> float | None:
        """Returns the moment by which the first token must come: by the client's deadline, and by the target of a
        class that refuses what would be late. None: there is no such moment.
        """
        seconds, target = self.deadlines.first_token, self.service_class.ttft
        if self.service_class.when_late == "refuse" and target is not None:
            seconds = min(seconds, target)
        return self.arrived + seconds if seconds < inf else None

    @property
    def token_interval(self) -> float | None:
        """Returns the seconds promised between two tokens, by the class or the client; None if neither sets any."""
        promised = self.service_class.time_per_output_token
        if self.deadlines.interval == inf:
            return promised
        return min(self.deadlines.interval, promised or inf)

    def as_recorded(
        self,
        request_id: str,
        tenant: str,
        key: str | None,
        sequences: list[Sequence],
        refusal: str | None = None,
    ) -> Asked:
        """Returns the request as the event log records it, with what refused it, if anything did."""
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

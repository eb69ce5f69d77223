"""What each tenant has used, to the moment: of requests that have ended, and of those that have not."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gateway.telemetry.metrics.tenant_labels import TenantLabels
from gateway.telemetry.story import Story, Trail


@dataclass(slots=True)
class Usage:
    """Never goes down. `service` in the unit of account: seconds of engine time unless tokens were chosen."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    block_seconds: float = 0.0
    service: float = 0.0

    def add(self, trail: Trail, now: float) -> None:
        sequence = trail.sequence
        self.prompt_tokens += sequence.num_billed_tokens
        self.output_tokens += len(sequence.output)
        self.block_seconds += sequence.block_seconds(now)
        self.service += sequence.charged


class TenantUsage:
    """By label, so that its size is bounded."""

    def __init__(self, labels: TenantLabels, live: Iterable[Story]) -> None:
        """`live` are the requests that have not ended, now and whenever it is asked."""
        self._labels = labels
        self._live = live
        self._ended: dict[str, Usage] = {}
        self._told: dict[str, int] = {}  # prompt tokens

    def ended(self, story: Story) -> None:
        for trail in story.trails:
            self._of(self._ended, trail).add(trail, story.ended or trail.queued)

    def read(self, now: float) -> dict[str, Usage]:
        """O(sequences of live requests).

        Prompt tokens count when their step is planned. One that is lost takes them back: what was told already stays.
        """
        usage = {label: replace(one) for label, one in self._ended.items()}
        for story in self._live:
            for trail in story.trails:
                self._of(usage, trail).add(trail, now)
        for label, one in usage.items():
            one.prompt_tokens = self._told[label] = max(one.prompt_tokens, self._told.get(label, 0))
        return usage

    def _of(self, usage: dict[str, Usage], trail: Trail) -> Usage:
        return usage.setdefault(self._labels.of(trail.sequence.tenant), Usage())

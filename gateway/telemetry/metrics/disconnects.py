"""How fast the engine lets go of requests whose clients have gone."""

from collections.abc import Callable

from admission.outcome import Outcome
from gateway.telemetry.metrics import buckets
from gateway.telemetry.metrics.registry import Registry
from gateway.telemetry.story import Story, Trail


class DisconnectMetrics:
    """`num_orphans` counts sequences in the engine that no request waits for."""

    def __init__(self, registry: Registry, num_orphans: Callable[[], int]) -> None:
        self._stop = registry.histogram(
            "sluice.disconnect.to_stop", "From a disconnect to the end of its sequences.", buckets.DISCONNECT
        ).at()
        self._release = registry.histogram(
            "sluice.disconnect.to_release", "From a disconnect to the release of its KV blocks.", buckets.DISCONNECT
        ).at()
        registry.gauge("sluice.orphans", "Sequences that no request waits for.", num_orphans)
        self._releasing: dict[Trail, float] = {}  # when their clients went

    def ended(self, story: Story) -> None:
        gone = story.scope.ended_early if story.scope is not None else None
        if gone is None or story.outcome is not Outcome.DISCONNECTED:
            return
        for trail in story.trails:
            if trail.ended is None or trail.ended < gone:
                continue  # its answer was complete before
            self._stop.observe(trail.ended - gone)
            if trail.released is None:
                self._releasing[trail] = gone
            else:
                self._release.observe(trail.released - gone)

    def released(self, trail: Trail) -> None:
        gone = self._releasing.pop(trail, None)
        if gone is not None and trail.released is not None:
            self._release.observe(trail.released - gone)

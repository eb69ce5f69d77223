"""The gateway itself: its event loop, its policy, and what it could not tell anybody."""

from collections import deque
from collections.abc import Callable, Sized

from gateway.policies import Policies
from gateway.telemetry.metrics.family import Family, Kind
from gateway.telemetry.metrics.registry import Registry
from gateway.telemetry.metrics.resources import show_resources

LAG_TICKS = 15  # of a second each, over which the loop's lag is the most that was seen


class ProcessMetrics:
    """What others keep is 0 until `bind` says who does."""

    def __init__(self, registry: Registry, policies: Policies, live: Sized) -> None:
        self._lags: deque[float] = deque(maxlen=LAG_TICKS)
        self._late = 0.0  # seconds, the sum of all lags
        self._sources: dict[str, Callable[[], float]] = {}
        registry.gauge("sluice.live_requests", "Requests being served.", lambda: len(live))
        self._show_policy(registry, policies)
        registry.gauge("sluice.loop.lag", "The most the event loop was late of late.", self._lag, "s")
        registry.total("sluice.loop.late", "How late the event loop was in all.", lambda: self._late, "s")
        for name, meaning in (
            ("sluice.tasks", "Tasks of the event loop."),
            ("sluice.spans.waiting", "Spans that wait for the collector."),
        ):
            registry.gauge(name, meaning, self._source(name))
        for name, meaning in (
            ("sluice.spans.exported", "Spans handed to the collector."),
            ("sluice.spans.dropped", "Spans lost."),
            ("sluice.traces.capped", "Requests not traced for the cap."),
            ("sluice.log_lines.dropped", "Log lines lost."),
        ):
            registry.total(name, meaning, self._source(name))
        self._pushes = registry.counter("sluice.metric_exports", "Pushes to the collector.", ("result",))
        for result in ("exported", "failed", "skipped"):
            self._pushes.at(result)
        show_resources(registry)

    def bind(self, name: str, read: Callable[[], float]) -> None:
        """From now on the metric says what `read` does."""
        assert name in self._sources, name
        self._sources[name] = read

    def pushed(self, result: str) -> None:
        """What came of a push: exported, failed or skipped."""
        self._pushes.at(result).value += 1

    def tick(self, lag: float) -> None:
        """Once a second: the event loop was so many seconds late."""
        self._lags.append(lag)
        self._late += lag

    def _lag(self) -> float:
        return max(self._lags, default=0.0)

    def _source(self, name: str) -> Callable[[], float]:
        self._sources[name] = lambda: 0
        return lambda: self._read(name)

    def _read(self, name: str) -> float:
        return self._sources[name]()

    @staticmethod
    def _show_policy(registry: Registry, policies: Policies) -> None:
        info = Family("sluice.policy.info", Kind.GAUGE, "", "The policy in force.", ("version",))
        registry.read(info, lambda: [((policies.current.version,), 1)])
        registry.total("sluice.policy.reloads", "Edits taken up.", lambda: policies.num_reloads)
        registry.total("sluice.policy.reload_failures", "Edits not valid.", lambda: policies.num_failures)

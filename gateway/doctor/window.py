"""What happened between two snapshots."""

from dataclasses import dataclass
from math import inf

from gateway.doctor.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Window:
    """Labels narrow a metric to the series that carry them."""

    before: Snapshot
    after: Snapshot

    @property
    def seconds(self) -> float:
        return max(self.after.at - self.before.at, 1e-9)

    def both(self, name: str) -> float:
        """The lesser of the engine's figures of this name: what was there all the time, as far as can be known."""
        return float(min(self.before.engine[name], self.after.engine[name]))

    def throughout(self, gauge: str) -> float:
        """The lesser of its two values: what was there all the time, as far as can be known."""
        return min(self.before.samples.total(gauge), self.after.samples.total(gauge))

    def increase(self, name: str, **labels: str) -> float:
        """Of a counter; one that was reset in between has begun anew."""
        before, after = self.before.samples.total(name, **labels), self.after.samples.total(name, **labels)
        return after - before if after >= before else after

    def count(self, histogram: str, **labels: str) -> float:
        return self.increase(f"{histogram}_count", **labels)

    def mean(self, histogram: str, **labels: str) -> float:
        """0 where nothing was observed."""
        count = self.count(histogram, **labels)
        return self.increase(f"{histogram}_sum", **labels) / count if count else 0.0

    def beyond(self, threshold: float, histogram: str, **labels: str) -> "Beyond":
        """Of what was observed, that was certainly above the threshold: above the next bound of the buckets."""
        before = self.before.samples.buckets(histogram, **labels)
        after = self.after.samples.buckets(histogram, **labels)
        increases = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
        bound = next((bound for bound in increases if bound >= threshold), inf)
        total = max(0.0, increases.get(inf, 0.0))
        return Beyond(bound, max(0.0, total - increases.get(bound, 0.0)), total)


@dataclass(frozen=True, slots=True)
class Beyond:
    """`count` of `total` were above `bound`."""

    bound: float
    count: float
    total: float

    @property
    def share(self) -> float:
        return self.count / self.total if self.total else 0.0

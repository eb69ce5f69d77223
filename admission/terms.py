"""What an admin may change while the core runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from admission.queue_bounds import QueueBounds


@dataclass(frozen=True, slots=True)
class Terms:
    """Of tenants and classes. Raises `ValueError` naming what cannot be."""

    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant, see `ordering.weight_of`
    offsets: tuple[float, ...] = ()  # seconds by which each class ranks behind the first
    bounds: tuple[QueueBounds, ...] = ()  # on what waits in each class
    may_wait: Mapping[str, int] = field(default_factory=dict)  # requests of a tenant at once; "" stands for the others

    def most_waiting(self, tenant: str) -> int | None:
        """Requests of the tenant that may wait; None: as many as come."""
        return self.may_wait.get(tenant, self.may_wait.get("") if tenant not in self.weights else None)

    def bounds_of(self, priority_class: int) -> QueueBounds | None:
        return self.bounds[priority_class] if priority_class < len(self.bounds) else None

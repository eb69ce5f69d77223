"""What deficit round robin keeps of each tenant."""

from dataclasses import dataclass

from admission.orderings.tenant_queue import TenantQueue


@dataclass(slots=True)
class DeficitAccount:
    """One tenant's credit and waiting work. Costs are in the unit of account: seconds of engine time, or tokens."""

    tenant: str
    weight: float  # relative to the heaviest tenant's
    waiting: TenantQueue
    credit: float = 0.0  # negative when in debt; grants of the rounds after `round` are not in it yet
    round: int = 0
    charged: float = 0.0  # all it ever used
    served: float = 0.0  # the same, each part over the weight of its time
    backlog_id: int = 0  # changes whenever work begins to wait
    turn: int = 0  # its place in the ring: behind everyone when work begins to wait, and after each admission
    held: str | None = None  # a limit of its own that keeps it out of the ring

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_granted(self) -> bool:
        """True while it is in the ring, where each round grants it its share."""
        return self.held is None and self.num_waiting > 0

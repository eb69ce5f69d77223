"""How long requests hold what they hold: what a client that must wait for one to end is told."""

from collections import OrderedDict

REMEMBERED = 4096  # tenants
SHARE = 0.1  # of the newest in the mean
FEWEST_SECONDS = 0.1


class HoldTimes:
    """A running mean for each tenant."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def until_next_end(self, tenant: str, held: int) -> float:
        """Seconds, when `held` requests run side by side and nothing more is known of them."""
        return max(FEWEST_SECONDS, self._means.get(tenant, 1.0) / max(held, 1))

    def observe(self, tenant: str, seconds: float) -> None:
        """A request of the tenant has held what it held for so long."""
        mean = self._means.pop(tenant, seconds)
        self._means[tenant] = mean + SHARE * (seconds - mean)
        if len(self._means) > REMEMBERED:
            self._means.popitem(last=False)

"""Which tenants have series of their own: a bounded number, whoever asks."""

from collections.abc import Iterable

MOST_TENANTS = 100
OTHER = "other"


class TenantLabels:
    """The first that come are called by their names for as long as the process lives, all the rest `OTHER`."""

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._named: dict[str, None] = {}

    def of(self, tenant: str) -> str:
        if tenant in self._named:
            return tenant
        if tenant == OTHER or len(self._named) >= self._most:
            return OTHER
        self._named[tenant] = None
        return tenant

    @property
    def names(self) -> Iterable[str]:
        """Those that have series of their own."""
        return self._named

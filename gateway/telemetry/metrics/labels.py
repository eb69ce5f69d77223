"""What the policy in force calls the classes of service that the engine numbers."""

from collections.abc import Iterable, Iterator

from gateway.errors import ApiError
from gateway.tenants.live_policy import LivePolicy


class ClassNames:
    def __init__(self, policies: LivePolicy) -> None:
        self._policies = policies

    def all(self) -> list[str]:
        """The most urgent first."""
        return [entry.name for entry in self._policies.current.classes]

    def of(self, level: int) -> str:
        """A class that a newer policy has no more goes by the name of the last one."""
        classes = self._policies.current.classes
        return classes[min(level, len(classes) - 1)].name


NO_CODE = "bad_request"


def reason_of(error: ApiError) -> tuple[str, str]:
    """Reason and code."""
    return _reason(type(error)), error.code or NO_CODE


def all_reasons() -> set[tuple[str, str]]:
    """Those of all errors there are."""
    return {(_reason(kind), kind.code or NO_CODE) for kind in _kinds(ApiError)}


def _reason(kind: type[ApiError]) -> str:
    return kind.dropped_reason or ("error" if kind.status >= 500 else "invalid")


def _kinds(kind: type[ApiError]) -> Iterator[type[ApiError]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _kinds(derived)


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

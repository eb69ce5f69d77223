"""The values of labels: names of classes, reasons of refusals, and a bounded number of tenants."""

from collections.abc import Iterable, Iterator

from backend.scheduler.sequence import SPARE_CLASS
from gateway.errors import ApiError
from gateway.tenants.live_policy import LivePolicy
from quotas.policy.policy import SPARE_CLASS_NAME


class ClassNames:
    """The current policy's names of the service classes, which the engine numbers."""

    def __init__(self, policies: LivePolicy) -> None:
        self._policies = policies

    def all(self) -> list[str]:
        """Returns the names of all classes of the policy, the most urgent first."""
        return [entry.name for entry in self._policies.current.classes]

    def of(self, level: int) -> str:
        """The name of a class; a class removed by a newer policy has the name of the newer one's last class."""
        classes = self._policies.current.classes
        if level >= SPARE_CLASS:
            return SPARE_CLASS_NAME
        return classes[min(level, len(classes) - 1)].name


NO_CODE = "bad_request"


def reason_of(error: ApiError) -> tuple[str, str]:
    """Returns the labels `reason` and `code` of an error."""
    return _reason(type(error)), error.code or NO_CODE


def all_reasons() -> set[tuple[str, str]]:
    """The labels of all known errors."""
    return {(_reason(kind), kind.code or NO_CODE) for kind in _kinds(ApiError)}


def _reason(kind: type[ApiError]) -> str:
    return kind.dropped_reason or ("error" if kind.status >= 500 else "invalid")


def _kinds(kind: type[ApiError]) -> Iterator[type[ApiError]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _kinds(derived)


MAX_TENANTS = 100
OTHER = "other"


class TenantLabels:
    """Labels the first tenants by name for as long as the process runs, and all others `OTHER`."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
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
        """Returns the tenants that have series of their own."""
        return self._named

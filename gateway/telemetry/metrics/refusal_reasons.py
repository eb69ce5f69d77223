"""How refusals are called in metrics: words of which there are few."""

from collections.abc import Iterator

from gateway.errors import ApiError

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

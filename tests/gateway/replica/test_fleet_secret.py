import pytest

from gateway.replica.fleet_secret import FleetSecret
from quotas.reservation import Attempt

PEPPER, OTHER = bytes(32), bytes(31) + b"1"
FIRST = Attempt("0123456789abcdef" * 2, 1)


def test_replicas_of_one_pepper_believe_their_router() -> None:
    header = FleetSecret(PEPPER).header(FIRST)
    assert FleetSecret(PEPPER).attempt(header) == FIRST
    assert FleetSecret(OTHER).attempt(header) is None


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"1",
        FleetSecret(PEPPER).header(FIRST).replace(b".1.", b".2."),
        FleetSecret(PEPPER).header(FIRST)[:-1],
        FleetSecret(PEPPER).header(FIRST) + b"0",
        FleetSecret(PEPPER).header(Attempt("r:*", 1)),
    ],
)
def test_nothing_else_is_believed(header: bytes | None) -> None:
    assert FleetSecret(PEPPER).attempt(header) is None

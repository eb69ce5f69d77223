import pytest

from gateway.tenants.fleet_secret import FleetSignatures, fleet_secret
from quotas.reservation import Attempt

PEPPER, OTHER = bytes(32), bytes(31) + b"1"
FIRST = Attempt("0123456789abcdef" * 2, 1)


def test_replicas_of_one_pepper_believe_their_router() -> None:
    header = FleetSignatures(PEPPER).header(FIRST)
    assert FleetSignatures(PEPPER).attempt(header) == FIRST
    assert FleetSignatures(OTHER).attempt(header) is None
    assert fleet_secret(PEPPER) != fleet_secret(OTHER)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"1",
        FleetSignatures(PEPPER).header(FIRST).replace(b".1.", b".2."),
        FleetSignatures(PEPPER).header(FIRST)[:-1],
        FleetSignatures(PEPPER).header(FIRST) + b"0",
        FleetSignatures(PEPPER).header(Attempt("r:*", 1)),
    ],
)
def test_nothing_else_is_believed(header: bytes | None) -> None:
    assert FleetSignatures(PEPPER).attempt(header) is None

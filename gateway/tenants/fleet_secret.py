"""The secret that a router and its replicas have in common, and what they sign with it.

It is derived from the pepper that their keys are hashed with, so there is none to configure.
"""

import hmac
import re

from quotas.reservation import Attempt

ATTEMPT_HEADER = b"x-sluice-attempt"
MAC_DIGITS = 32
_HEADER = re.compile(rb"(([0-9a-f]{32})\.([1-9]))\.([0-9a-f]{32})")


def fleet_secret(pepper: bytes) -> bytes:
    """Return the secret that belongs to a pepper."""
    return hmac.digest(pepper, b"sluice fleet", "sha256")


class FleetSignatures:
    """Signs attempts in a router, and tells a replica which of them a router has signed."""

    def __init__(self, pepper: bytes) -> None:
        self._secret = fleet_secret(pepper)

    def header(self, attempt: Attempt) -> bytes:
        """Return the value of `ATTEMPT_HEADER` for an attempt of a request whose id has 32 hexadecimal digits."""
        name = f"{attempt.request}.{attempt.number}".encode()
        return name + b"." + self._mac(name)

    def attempt(self, header: bytes | None) -> Attempt | None:
        """Return the attempt that a header names; None where a router has not signed it."""
        match = _HEADER.fullmatch(header) if header else None
        if match is None or not hmac.compare_digest(match[4], self._mac(match[1])):
            return None
        return Attempt(match[2].decode(), int(match[3]))

    def _mac(self, name: bytes) -> bytes:
        return hmac.digest(self._secret, name, "sha256").hex()[:MAC_DIGITS].encode()

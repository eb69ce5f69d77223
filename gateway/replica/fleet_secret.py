"""The secret that a router and its replicas share, and their signatures and digests under it.

It is derived from the pepper that their keys are hashed with, so there is none to configure.
"""

import hmac
import re
from typing import NamedTuple

from gateway.replica.digests import beginnings, prompt_bytes
from quotas.reservation import Attempt

ATTEMPT_HEADER = b"x-sluice-attempt"
PROGRESS_HEADER = b"x-sluice-progress"  # with which a router asks to be told how many tokens a stream has had so far
MAC_DIGITS = 32
_HEADER = re.compile(rb"(([0-9a-f]{32})\.([1-9]))\.([0-9a-f]{32})")


class Beginnings(NamedTuple):
    """The digests of a prompt's beginnings, the shortest first, and the bytes of the whole."""

    digests: tuple[bytes, ...]
    num_bytes: int


UNKNOWN = Beginnings((), 0)


class FleetSecret:
    """Signs attempts in a router, and addresses in a replica, each for the other; both name beginnings alike."""

    def __init__(self, pepper: bytes) -> None:
        self._secret = hmac.digest(pepper, b"sluice fleet", "sha256")

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

    def sealed(self, said: bytes) -> bytes:
        """Return what is said, for those who have the secret to know that one of them says it."""
        return self._mac(said) + b" " + said

    def opened(self, sealed: bytes) -> bytes | None:
        """Return what `sealed` was given; None where nobody who has the secret said that."""
        mac, _, said = sealed.partition(b" ")
        return said if hmac.compare_digest(mac, self._mac(said)) else None

    def beginnings(self, body: bytes, scope: str) -> Beginnings:
        """Return the beginnings of the prompt in a body, for those who share a cache: the `scope`."""
        prompt = prompt_bytes(body)
        return Beginnings(beginnings(prompt, scope, self._secret), len(prompt))

    def _mac(self, name: bytes) -> bytes:
        return hmac.digest(self._secret, name, "sha256").hex()[:MAC_DIGITS].encode()

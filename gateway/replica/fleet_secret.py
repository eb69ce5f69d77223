"""The secret shared by a router and its replicas, with their signatures and digests.

It is derived from the pepper that their keys are hashed with, so there is none to configure.
"""

import hmac
import re
from typing import NamedTuple

from gateway.replica.digests import beginnings, prompt_bytes
from quotas.reservation import Attempt

ATTEMPT_HEADER = b"x-sluice-attempt"
PROGRESS_HEADER = b"x-sluice-progress"  # requests progress comments in a stream: the number of its tokens so far
MAC_DIGITS = 32
_HEADER = re.compile(rb"(([0-9a-f]{32})\.([1-9]))\.([0-9a-f]{32})")


class Beginnings(NamedTuple):
    """The digests of a prompt's beginnings, the shortest first, and the bytes of the whole."""

    digests: tuple[bytes, ...]
    num_bytes: int


UNKNOWN = Beginnings((), 0)


class FleetSecret:
    """Signs attempts in a router, and addresses in a replica, each for the other; both digest beginnings alike."""

    def __init__(self, pepper: bytes) -> None:
        self._secret = hmac.digest(pepper, b"sluice fleet", "sha256")

    def header(self, attempt: Attempt) -> bytes:
        """The value of `ATTEMPT_HEADER` for an attempt of a request whose id has 32 hexadecimal digits."""
        name = f"{attempt.request}.{attempt.number}".encode()
        return name + b"." + self._mac(name)

    def attempt(self, header: bytes | None) -> Attempt | None:
        """The attempt in a header; None without a router's signature."""
        match = _HEADER.fullmatch(header) if header else None
        if match is None or not hmac.compare_digest(match[4], self._mac(match[1])):
            return None
        return Attempt(match[2].decode(), int(match[3]))

    def sealed(self, said: bytes) -> bytes:
        """A signed message, which holders of the secret can verify."""
        return self._mac(said) + b" " + said

    def opened(self, sealed: bytes) -> bytes | None:
        """The message signed by `sealed`; None if the signature is wrong."""
        mac, _, said = sealed.partition(b" ")
        return said if hmac.compare_digest(mac, self._mac(said)) else None

    def beginnings(self, body: bytes, scope: str) -> Beginnings:
        """The beginnings of a body's prompt, for the `scope` that shares the cache."""
        prompt = prompt_bytes(body)
        return Beginnings(beginnings(prompt, scope, self._secret), len(prompt))

    def _mac(self, name: bytes) -> bytes:
        return hmac.digest(self._secret, name, "sha256").hex()[:MAC_DIGITS].encode()

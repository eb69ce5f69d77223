"""Requests with uncached prompts, and the check of it: else the benchmark measures a cache."""

import re
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import count

MARK = "########"  # where a request's number stands, near the beginning of its prompt
HITS = re.compile(r"^vllm:prefix_cache_hits_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_numbers = count()
STRIDE = 61_803_399  # between two numbers, modulo 10^8: also their first digits differ


class Fresh(Iterator[bytes]):
    """One request again and again, with a number of its own wherever `MARK` stands in it."""

    def __init__(self, request: bytes) -> None:
        self._parts = request.split(MARK.encode())
        assert len(self._parts) > 1, f"no {MARK} in {request[:500]!r}"

    def __next__(self) -> bytes:
        return (b"%08d" % (next(_numbers) * STRIDE % 10**8)).join(self._parts)


def check_nothing_was_cached(port: int) -> None:
    """Raise `Cached` if a gateway has found any token of a prompt in its cache since it began."""
    if found := cached_tokens(port):
        raise Cached(f"{found:,} tokens of prompts were found in the cache: the figures are the cache's")


def cached_tokens(port: int) -> int:
    """The cached tokens that a gateway has found since its start; it has to serve its metrics:
    `metrics_on_tenant_port`.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        found = HITS.search(connection.getresponse().read().decode())
    finally:
        connection.close()
    assert found, "the gateway tells no metrics on its port"
    return int(float(found[1]))


class Cached(RuntimeError):
    """Prompts that were to be computed were found in a cache."""

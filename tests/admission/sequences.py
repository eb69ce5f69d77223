"""Sequences to test with."""

from typing import Any

from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import Sequence


def make_sequence(
    name: str = "s", tenant: str = "a", prompt: int = 1, output: int = 1, end: int | None = None, **fields: Any
) -> Sequence:
    """Makes a sequence of so many prompt tokens, which may generate `output` tokens, and ends with the token `end`."""
    ends = frozenset[int]() if end is None else frozenset([end])
    return Sequence(name, tenant, [0] * prompt, SamplingParams(), output, 0, ends, **fields)

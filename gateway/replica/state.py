"""A replica's documents about itself: `GET /admin/v1/state` for our router, and totals for other routers. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

PAIRS_COEFFICIENT = 5  # index among the coefficients of the step-time model


@dataclass(frozen=True, slots=True)
class WaitingWork:
    """The backlog of one tenant."""

    requests: int
    prefill_seconds: float  # predicted, of its prompts' uncached tokens
    seconds: float  # predicted, of the engine's time, answers included


@dataclass(frozen=True, slots=True)
class StepCost:
    """The coefficients of the step-time model, in seconds a unit, and its relative error (docs/metrics.md)."""

    coefficients: tuple[float, ...]
    knee: int  # tokens in a step
    relative_error: float

    @property
    def pair_seconds(self) -> float:
        """Seconds of one query-key pair of a prompt."""
        return self.coefficients[PAIRS_COEFFICIENT] if len(self.coefficients) > PAIRS_COEFFICIENT else 0.0


@dataclass(frozen=True, slots=True)
class KVTokens:
    """The KV memory of a replica, in tokens."""

    total: int
    free: int  # free blocks
    cached: int  # idle cached blocks
    looked_for: int = 0  # of prompts, in the prefix cache, since the start
    found: int = 0  # of those


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of cached beginnings since a router asked last; their digests are in hexadecimal."""

    next: int  # the event from which the router asks next
    cached: Sequence[str]
    evicted: Sequence[str]
    is_all: bool  # nothing else is cached
    behind: Mapping[str, int] = field(default_factory=dict)  # cached bytes behind a digest


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """The load of a replica, all tenants together, in other routers' terms."""

    running: int  # sequences
    waiting: int
    seats: int  # most sequences at once
    waiting_tokens: int  # of prompts, not computed and not cached
    held_tokens: int  # of the KV memory
    total_tokens: int
    tokens_per_second: float  # of answers, as predicted of the newest step
    cache_hit_rate: float  # of the prompt tokens since the start


NO_CHANGES = Changes(0, (), (), is_all=False)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica at one moment; times are predicted seconds."""

    instance: str  # changes with each start, which empties the cache
    model: str
    draining: bool
    running: int
    seats: int  # most sequences at once
    seat_seconds: float  # until one of those running ends; 0 while a seat is free
    step_seconds: float  # until the newest step in flight is done
    prefill_seconds: float  # of prompts that are being computed
    token_seconds: float  # of a prompt's token beside the present decodes, without attention
    bytes_per_token: float  # of prompts, as they come in request bodies
    work_seconds: float  # of all that runs and waits
    replicas_wanted: float  # that, over the target of one replica
    step: StepCost
    kv: KVTokens
    waiting: Mapping[str, WaitingWork] = field(default_factory=dict)  # by tenant
    running_by_tenant: Mapping[str, int] = field(default_factory=dict)
    version: str = ""  # of Sluice
    policy: str = ""  # the version of the policy in force
    beginnings: Changes = NO_CHANGES


class StateError(ValueError):
    """A document is no state of a replica; the message says where."""


_ADAPTER = TypeAdapter(ReplicaState)


def parse_state(document: bytes) -> ReplicaState:
    """Parse a state. Raises `StateError`."""
    try:
        return _ADAPTER.validate_json(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise StateError(f"{place}: {first['msg']}") from None

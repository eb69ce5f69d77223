"""The interface to the engine, in this process or another: limits, tokens and health.

`InProcessClient` calls an engine on the same event loop; `WorkerClient` calls one in another process.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from backend.stream import TokenStream
from gateway.api.engine_request import EngineRequest
from gateway.errors import ApiError
from gateway.replica.state import LoadTotals
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.reservation import LimitState
from quotas.stored import Held, Stored

STARTED, ALIVE, READY = "started", "alive", "ready"


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the server; each function is called for every probe. A draining server is alive and not ready."""

    started: Callable[[], bool]
    alive: Callable[[], bool]
    ready: Callable[[], bool]

    def of(self, probe: str) -> bool:
        """The result of one of the probes `STARTED`, `ALIVE` and `READY`."""
        return {STARTED: self.started, ALIVE: self.alive, READY: self.ready}[probe]()


class ParsedAnswer(Protocol):
    """An answer whose reader counts its tokens of reasoning."""

    @property
    def num_reasoning_tokens(self) -> int: ...


class Generation(Protocol):
    """One request that was admitted, from its first token until `close`."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the answer: what is left of the limits, and when its tokens are expected."""
        ...

    @property
    def streams(self) -> Sequence[TokenStream]:
        """The tokens of the answer to each prompt."""
        ...

    @property
    def parsed(self) -> list[ParsedAnswer]:
        """The answers that may have reasoning, which the endpoint adds: what they count is charged."""
        ...

    def stop(self, stream: TokenStream, num_tokens: int) -> None:
        """End a stream whose text has reached a stop string after `num_tokens` of its tokens."""
        ...

    async def settle(self) -> None:
        """Charge what was used and return the rest, before the client has the last of its answer and may ask again."""
        ...

    def close(self) -> None:
        """End the open streams, and settle if that has not happened."""
        ...


class RequestCharge(Protocol):
    """A request that is charged to its tenant's limits and needs no engine."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the answer: what is left of the limits."""
        ...

    was_served: bool  # set by the endpoint that answered: otherwise the charge is returned

    def close(self) -> None:
        """Settle what was charged."""
        ...


class KVMemory(NamedTuple):
    """The KV memory of one tenant in this gateway, in bytes."""

    held: int  # by its requests
    kept: int  # idle, by its floor and its pinned prompts
    leased: int | None  # the most that requests and pinned prompts may hold at present; None: they need no lease


class EncodingAsk(NamedTuple):
    """Inputs to embed or to score, `within` seconds."""

    model: str
    inputs: Sequence[Sequence[int]]
    within: float
    is_relative: bool = True  # counted from each attempt
    usage_row: str | None = None  # of the ledger, in which their use is booked


class EngineClient(Protocol):
    """Asks the engine. Every refusal raises an `ApiError`, whose headers tell what is left of the limits."""

    @property
    def refused_tenants(self) -> Set[str]:
        """Tenants with a recent faulty request; `check_refusals` passes all others."""
        ...

    async def generate(
        self,
        request: EngineRequest,
        policy: EffectivePolicy,
        record: RequestRecord,
        fail: Callable[[ApiError], object],
    ) -> Generation:
        """Charge a request to its limits and queue it. `fail` is called with the error that ends it early. Raises
        `DeviceError` if the engine has failed.
        """
        ...

    async def refuse_unread(self, policy: EffectivePolicy, request_id: str) -> None:
        """Refuse a request before it is read, if its key was refused lately and the limit is still spent."""
        ...

    async def refuse_spent(self, policy: EffectivePolicy) -> None:
        """Refuse if a limit of the key is spent. An unreachable store refuses no request."""
        ...

    async def check_refusals(self, policy: EffectivePolicy) -> None:
        """Refuse if too many requests of the key or its tenant were refused lately."""
        ...

    async def refused(self, error: ApiError, tenant: str | None, key: str | None, peer: str, num_bytes: int) -> float:
        """Count a refusal of a request of `num_bytes` from an IP address; returns the seconds by which to delay it."""
        ...

    async def charge(self, policy: EffectivePolicy, in_passing: bool = False) -> RequestCharge:
        """Charge one request that spends no tokens; `in_passing`: it does not count for its tenant's concurrency, as it
        is about requests that do.
        """
        ...

    async def store_response(
        self,
        policy: EffectivePolicy,
        name: str,
        previous: str | None,
        contents: bytes,
        replaced: str | None = None,
        life: float = inf,
    ) -> Stored:
        """Store a response of the tenant for the time of its policy, at most `life` seconds: see `ResponseStore`."""
        ...

    async def read_responses(self, tenant: str, name: str, alone: bool) -> Sequence[bytes] | None:
        """The contents of a response and, unless `alone`, of its predecessors, oldest first; None if one is missing."""
        ...

    async def delete_response(self, tenant: str, name: str) -> bool:
        """Delete a response. Returns whether there was one."""
        ...

    async def open_response(self, tenant: str, what: str, name: str, most: int = 0) -> Held:
        """Ask for the lease of a response in the background: open, hold, look, cancel or close it."""
        ...

    async def batches(self, what: str, *told: Any) -> Any:
        """Ask the store of files and batches: see `BatchRecords`."""
        ...

    async def encode(self, asked: EncodingAsk, policy: EffectivePolicy) -> tuple[Mapping[str, str], Sequence[bytes]]:
        """Charge inputs to their limits and encode them. Returns the answer's headers, and the vector of each input, of
        32-bit floats. Raises `DeviceError` if the engine has failed.
        """
        ...

    async def limit_states(self, policy: EffectivePolicy, session: str | None) -> Sequence[LimitState]:
        """Returns the state of each limit that the key is charged to."""
        ...

    async def kv_memory(self, policy: EffectivePolicy) -> KVMemory:
        """The tenant's present KV memory."""
        ...

    async def load(self) -> LoadTotals:
        """The engine's present load, all tenants together."""
        ...

    async def health(self, probe: str) -> tuple[bool, Mapping[str, object]]:
        """The result of a probe, and details for the operator of a ready server."""
        ...

    async def metrics_text(self) -> bytes:
        """Returns every metric in Prometheus' text format."""
        ...

"""The names used in an event log, and the code's object behind each.

The log's names are in the order of writing. Once a release has written logs, they stay fixed for that version, or
recorded logs could not be replayed; an object that is renamed in the code keeps its name here.

A new field, refusal or value gets a name here, in the order of writing. Older logs lack it: the logs of
tests/labs/core/recorded are recorded anew (`python -m scripts.record_logs`), and `VERSION` rises once a release has
written any.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from admission.core import CoreConfig, MemoryGate, Overload
from admission.kv.retention import BetweenTurnsRule
from admission.kv.swap_choice import SwapRule
from admission.outcome import AdmissionRefused, DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.request import JudgedPrompt, JudgedRequest
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from backend.config import Batching, EngineConfig, KVAllocation
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import FinishReason

VERSION = 16

T = TypeVar("T")


class Names(Generic[T]):
    """A bijection between names and objects."""

    def __init__(self, things: Mapping[str, T]) -> None:
        self._things = dict(things)
        self._names = {thing: name for name, thing in things.items()}
        assert len(self._names) == len(self._things), "one thing has two names"

    def __getitem__(self, name: str) -> T:
        """Return the object of a name. Raises `KeyError`."""
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def of(self, thing: T) -> str:
        """Return the name of an object. Raises `KeyError`."""
        return self._names[thing]

    def items(self) -> Iterator[tuple[str, T]]:
        return iter(self._things.items())


ENGINE_FIELDS = Names(
    {
        name: name
        for name in (
            "num_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk",
            "batching", "max_batch_delay", "preferred_batch_sizes", "kv_allocation", "steps_in_flight",
            "max_preemptions", "prefix_cache", "num_host_blocks", "block_copy_seconds", "copies_run_ahead",
        )
    }
)  # fmt: skip
ADAPTER_FIELDS = Names({name: name for name in ("max_adapter_rank", "adapter_block_seconds")})
"""The fields that the log of an engine with adapters has beside."""
SLEEP_FIELDS = Names({name: name for name in ("awake_bytes", "weight_bytes", "wake_seconds")})
"""The fields that the log of an engine whose models sleep has beside."""
WINDOW_FIELDS = Names({name: name for name in ("window_groups", "window_tokens", "window_alignment")})
"""The fields that the log of an engine whose layers with a window have blocks of their own has beside."""
EXPERT_FIELDS = Names({"expert_reads": "expert_reads"})
"""The fields that the log of an engine with a model of experts has beside."""

CORE_FIELDS = Names(
    {
        {"burst_s": "burst"}.get(name, name): name
        for name in (
            "order", "weights", "burst_s", "seconds_per_class", "memory", "min_free_blocks", "swap", "between_turns",
            "prefill_share", "overload", "confidence", "max_waiting", "max_waiting_tokens", "max_waiting_bytes",
            "max_waiting_seconds", "tenant_max_waiting", "tenant_max_waiting_tokens", "tenant_max_waiting_bytes",
            "tenant_max_waiting_seconds", "memory_risk", "calibration", "spare_share",
        )
    }
)  # fmt: skip
CHOICES: Mapping[str, Names[Any]] = {  # by the field's name in the log, its possible values
    "batching": Names({one.value: one for one in Batching}),
    "kv_allocation": Names({one.value: one for one in KVAllocation}),
    "swap": Names({one.value: one for one in SwapRule}),
    "between_turns": Names({one.value: one for one in BetweenTurnsRule}),
    "memory": Names({one.value: one for one in MemoryGate}),
    "overload": Names({one.value: one for one in Overload}),
}
REFUSALS: Names[type[AdmissionRefused]] = Names(
    {"QueueFull": QueueFull, "TenantQueueFull": TenantQueueFull, "DeadlineUnmeetable": DeadlineInfeasible}
)
FINISH_REASONS = Names({one.value: one for one in FinishReason})
OBSTACLES = Names({one.value: one for one in WaitReason})
POLICY_FIELDS = ("weights", "offsets", "bounds", "may_wait")  # fields of `SchedulingPolicy`, written by position
BOUNDS = ("count", "tokens", "bytes", "seconds")  # the same of `QueueBounds`


def core_entry(config: CoreConfig) -> dict[str, Any]:
    """Return the core's configuration as the first line of a log has it."""
    return _entry(config, CORE_FIELDS)


def engine_entry(config: EngineConfig) -> dict[str, Any]:
    """Return the engine's configuration as the first line of a log has it."""
    of_adapters = _entry(config, ADAPTER_FIELDS) if config.max_adapter_rank else {}
    of_sleep = _entry(config, SLEEP_FIELDS) if config.awake_bytes else {}
    of_experts = _entry(config, EXPERT_FIELDS) if config.expert_reads else {}
    of_windows = _entry(config, WINDOW_FIELDS) if config.window_groups else {}
    return _entry(config, ENGINE_FIELDS) | of_adapters | of_sleep | of_experts | of_windows


def read_core_config(entry: Mapping[str, Any]) -> CoreConfig:
    """Read a `core_entry`. Raises `KeyError`, `ValueError` or `TypeError` if malformed."""
    return CoreConfig(**_values(entry, CORE_FIELDS))


def read_engine_config(entry: Mapping[str, Any]) -> EngineConfig:
    """Read an `engine_entry`. Raises `KeyError`, `TypeError` or `ConfigError` if malformed."""
    values = _values(entry, ENGINE_FIELDS)
    for fields in (ADAPTER_FIELDS, SLEEP_FIELDS, EXPERT_FIELDS, WINDOW_FIELDS):
        values |= _values(entry, fields) if any(name in entry for name in fields) else {}
    return EngineConfig(**values)


def _entry(config: CoreConfig | EngineConfig, fields: Names[str]) -> dict[str, Any]:
    return {name: _said(name, getattr(config, field)) for name, field in fields.items()}


def _said(name: str, value: Any) -> Any:
    if name in CHOICES:
        return CHOICES[name].of(value)
    return dict(value) if isinstance(value, Mapping) else value


def _values(entry: Mapping[str, Any], fields: Names[str]) -> dict[str, Any]:
    return {field: _meant(name, entry[name]) for name, field in fields.items()}


def _meant(name: str, said: Any) -> Any:
    if name in CHOICES:
        return CHOICES[name][said]
    return tuple([_meant(name, one) for one in said]) if isinstance(said, list) else said


def policy_entry(policy: SchedulingPolicy) -> list[Any]:
    """Return a scheduling policy's log entry."""
    weights, offsets, bounds, may_wait = (getattr(policy, field) for field in POLICY_FIELDS)
    each = [[getattr(one, unit) for unit in BOUNDS] for one in bounds]
    return [dict(weights), list(offsets), each, dict(may_wait)]


def read_scheduling_policy(entry: list[Any]) -> SchedulingPolicy:
    """Read a `policy_entry`. Raises `ValueError` or `TypeError` if malformed."""
    weights, offsets, bounds, may_wait = entry
    each = tuple(QueueBounds(**dict(zip(BOUNDS, one, strict=True))) for one in bounds)
    values = weights, tuple(offsets), each, may_wait
    return SchedulingPolicy(**dict(zip(POLICY_FIELDS, values, strict=True)))


def asked_of(entry: list[Any]) -> JudgedRequest:
    """Read a `request` entry. Raises `ValueError` or `TypeError` if malformed."""
    _, _, name, tenant, key, tier, size, first, last, interval, prompts, refusal = entry
    each = tuple(JudgedPrompt(*prompt) for prompt in prompts)
    asked = JudgedRequest(name, tenant, key, tier, size, first, last, interval, each, refusal)
    texts, numbers = (name, tenant, key or "", tier or "", refusal or ""), (size, first or 0, last or 0, interval or 0)
    lengths = [length for prompt in each for length in (prompt.prompt_tokens, prompt.most)]
    if not (each or refusal) or not all(isinstance(length, int) and length > 0 for length in lengths):
        raise ValueError("a request has prompts and answers of at least one token")
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, int | float) for n in numbers):
        raise ValueError("a request has names, and seconds")
    return asked

"""The names used in an event log, and the code's object behind each.

Fields are in the order of writing. Once a release has written logs, names and the values of enums stay fixed for that
version, or recorded logs could not be replayed; a field that is renamed in the code keeps its name in the log
(`LOGGED_AS`).

A new field or refusal gets a name here, in the order of writing. Older logs lack it: the logs of
tests/labs/core/recorded are recorded anew (`python -m scripts.record_logs`), and `VERSION` rises once a release has
written any.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from admission.core import CoreConfig, MemoryGate, Overload
from admission.kv.retention import BetweenTurnsRule
from admission.kv.swap_choice import SwapRule
from admission.outcome import AdmissionRefused, DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.request import JudgedPrompt, JudgedRequest
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from backend.config import Batching, EngineConfig, KVAllocation

VERSION = 16

ENGINE_FIELDS = (
    "num_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "batching",
    "max_batch_delay", "preferred_batch_sizes", "kv_allocation", "steps_in_flight", "max_preemptions", "prefix_cache",
    "num_host_blocks", "block_copy_seconds", "copies_run_ahead",
)  # fmt: skip
ADAPTER_FIELDS = ("max_adapter_rank", "adapter_block_seconds")
"""The fields that the log of an engine with adapters has beside."""
SLEEP_FIELDS = ("awake_bytes", "weight_bytes", "wake_seconds")
"""The fields that the log of an engine whose models sleep has beside."""
WINDOW_FIELDS = ("window_groups", "window_tokens", "window_alignment", "further_windows")
"""The fields that the log of an engine whose layers with a window have blocks of their own has beside."""
EXPERT_FIELDS = ("expert_reads",)
"""The fields that the log of an engine with a model of experts has beside."""
SPECULATION_FIELDS = ("speculate",)
"""The field that the log of an engine which drafts has beside."""
CORE_FIELDS = (
    "order", "weights", "burst_s", "seconds_per_class", "memory", "min_free_blocks", "swap", "between_turns",
    "prefill_share", "overload", "confidence", "max_waiting", "max_waiting_tokens", "max_waiting_bytes",
    "max_waiting_seconds", "tenant_max_waiting", "tenant_max_waiting_tokens", "tenant_max_waiting_bytes",
    "tenant_max_waiting_seconds", "memory_risk", "calibration", "spare_share",
)  # fmt: skip
LOGGED_AS = {"burst_s": "burst"}
"""The names in the log of fields that have another in the code."""
CHOICES: Mapping[str, type[Enum]] = {  # by field; the log has the value of a member
    "batching": Batching,
    "kv_allocation": KVAllocation,
    "swap": SwapRule,
    "between_turns": BetweenTurnsRule,
    "memory": MemoryGate,
    "overload": Overload,
}
REFUSALS: Mapping[type[AdmissionRefused], str] = {
    QueueFull: "QueueFull",
    TenantQueueFull: "TenantQueueFull",
    DeadlineInfeasible: "DeadlineUnmeetable",
}
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
    of_windows = _entry(config, WINDOW_FIELDS) if config.most_window_groups else {}
    of_drafts = _entry(config, SPECULATION_FIELDS) if config.speculate != "off" else {}
    return _entry(config, ENGINE_FIELDS) | of_adapters | of_sleep | of_experts | of_windows | of_drafts


def read_core_config(entry: Mapping[str, Any]) -> CoreConfig:
    """Read a `core_entry`. Raises `KeyError`, `ValueError` or `TypeError` if malformed."""
    return CoreConfig(**_values(entry, CORE_FIELDS))


def read_engine_config(entry: Mapping[str, Any]) -> EngineConfig:
    """Read an `engine_entry`. Raises `KeyError`, `ValueError`, `TypeError` or `ConfigError` if malformed."""
    values = _values(entry, ENGINE_FIELDS)
    for fields in (ADAPTER_FIELDS, SLEEP_FIELDS, EXPERT_FIELDS, WINDOW_FIELDS, SPECULATION_FIELDS):
        values |= _values(entry, fields) if any(name in entry for name in fields) else {}
    return EngineConfig(**values)


def _entry(config: CoreConfig | EngineConfig, fields: tuple[str, ...]) -> dict[str, Any]:
    return {LOGGED_AS.get(field, field): _said(getattr(config, field)) for field in fields}


def _said(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return dict(value) if isinstance(value, Mapping) else value


def _values(entry: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: _meant(field, entry[LOGGED_AS.get(field, field)]) for field in fields}


def _meant(field: str, said: Any) -> Any:
    if field in CHOICES:
        return CHOICES[field](said)
    return tuple([_meant(field, one) for one in said]) if isinstance(said, list) else said


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

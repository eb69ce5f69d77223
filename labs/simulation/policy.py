"""Reads a policy as it is written on a command line: settings of the core and the engine as `key=value` pairs.

fcfs                                   an order alone
overload=bounded,max_num_seqs=128      any field of `CoreConfig` and `EngineConfig`
order=fair,weights=gold:4+free:1       weights by tenant, joined by +
kv_tokens=10000                        memory in tokens instead of num_blocks
prefix_cache=off                       without a prefix cache
num_host_blocks=9000,block_copy_seconds=84e-6   blocks in the host's memory, and how long copying one takes
speculate=4,acceptance=0.7,draft=0.05  tokens drafted for each row (smart:4: up to 4, chosen for each step), the
                                       share accepted (by tenant: one:0.8+two:0.5), and what a drafted token costs
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

import labs.choices  # noqa: F401 - adds what can be chosen
from admission.controller import Controller
from admission.core import ORDERS, CoreConfig, MemoryGate, Overload, make_core
from admission.kv.retention import BetweenTurnsRule
from admission.kv.swap_choice import SwapRule
from admission.scheduling_policy import SchedulingPolicy
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.config import Batching, EngineConfig, KVAllocation
from backend.errors import ConfigError
from labs.simulation.arrival import NO_TARGET, ClassTarget
from labs.simulation.device import Device, Served
from labs.simulation.errors import OptionError
from labs.simulation.gateway_rules import GatewayRules
from labs.simulation.speculation import Speculation

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 131_072


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """The configuration of one simulated run's core."""

    name: str
    core: CoreConfig
    engine: EngineConfig
    scheduling_policy: SchedulingPolicy | None = None
    targets: tuple[ClassTarget, ...] = ()  # by class
    prior: tuple[StepTime, float] | None = None  # initial step times, and their weight in steps
    rules: GatewayRules | None = None  # classes and limits; None: none
    class_names: tuple[str, ...] = ()
    speculation: Speculation | None = None  # None: each row brings one token

    def make_core(self) -> Controller:
        engine = replace(self.engine, speculate="off")  # without texts nothing can be looked up
        core = make_core(self.core, engine, StepTimeModel(*self.prior) if self.prior else None)
        if self.scheduling_policy is not None:
            core.set_policy(self.scheduling_policy, 0.0)
        return core

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights by tenant; "" stands for unnamed tenants."""
        return self.core.weights if self.scheduling_policy is None else self.scheduling_policy.weights

    def target(self, priority_class: int) -> ClassTarget:
        return self.targets[priority_class] if priority_class < len(self.targets) else NO_TARGET

    @property
    def states_targets(self) -> bool:
        return any(target.first_token or target.interval for target in self.targets)


def make_simulated_policy(
    name: str,
    scheduling_policy: SchedulingPolicy,
    targets: tuple[ClassTarget, ...],
    device: Device,
    class_names: tuple[str, ...] = (),
    settings: str = "",
    option: str = "--policy",
) -> SimulatedPolicy:
    """The default core under this policy, or the recorded one, with other settings.

    Raises `OptionError` if the settings are invalid, or are the policy's own.
    """
    if own := {"weights", "seconds_per_class"} & {part.partition("=")[0] for part in settings.split(",")}:
        raise OptionError(option, settings, f"{' and '.join(sorted(own))} are set in the policy file: edit it there")
    base = parse_simulated_policy(settings, device, option) if settings else _base(option, {}, device)
    return replace(base, name=name, scheduling_policy=scheduling_policy, targets=targets, class_names=class_names)


def recorded_policy(served: Served) -> SimulatedPolicy:
    return SimulatedPolicy(
        "as recorded",
        served.core,
        served.engine,
        served.scheduling_policy,
        served.targets,
        served.prior,
    )


def parse_simulated_policy(text: str, device: Device, option: str = "--policy") -> SimulatedPolicy:
    """Reads settings. Others are the recorded ones, or the defaults. Raises `OptionError`."""
    values = _pairs(text, option)
    engine = {key: values.pop(key) for key in (_ENGINE_KEYS | {"kv_tokens"}) & values.keys()}
    drafting = {key: values.pop(key) for key in _SPECULATION_KEYS & values.keys()}
    try:
        settings: dict[str, Any] = {key: _value(option, CoreConfig, key, value) for key, value in values.items()}
        base = _base(option, engine, device)
        if (speculation := _speculation(drafting)) is not None:
            base = replace(base, speculation=speculation, engine=replace(base.engine, steps_in_flight=1))
        if base.engine.num_host_blocks and not base.engine.block_copy_seconds:
            reason = "num_host_blocks needs block_copy_seconds: copies of 2 MiB at 25 GB/s take 84e-6 each"
            raise OptionError(option, text, reason)
        return replace(
            base,
            name=text,
            core=replace(base.core, **settings),
            scheduling_policy=_amended(base.scheduling_policy, settings),
        )
    except (ConfigError, ValueError) as error:
        raise OptionError(option, text, str(error)) from None


def _speculation(values: Mapping[str, str]) -> Speculation | None:
    """Reads how tokens are drafted. Raises `ValueError`."""
    if not values:
        return None
    if "speculate" not in values:
        raise ValueError(f"{', '.join(sorted(values))} needs speculate=N, the tokens drafted for each row")
    smart, _, tokens = values["speculate"].rpartition(":")
    if smart not in ("", "smart"):
        raise ValueError("speculate must be a number of tokens, or smart:N")
    acceptance = values.get("acceptance", "0.7")
    by_tenant = _weights(acceptance) if ":" in acceptance else {"": _number(acceptance)}
    return Speculation(_integer(tokens), bool(smart), by_tenant, _number(values.get("draft", "0")))


def _base(option: str, given: Mapping[str, str], device: Device) -> SimulatedPolicy:
    """A policy of an engine with these settings; all others are the recorded ones, or the defaults."""
    engine = _engine(option, given, device)
    if device.served is None:
        return SimulatedPolicy("default", CoreConfig(), engine)
    return replace(recorded_policy(device.served), engine=engine)


def _amended(policy: SchedulingPolicy | None, settings: Mapping[str, Any]) -> SchedulingPolicy | None:
    """Returns the recorded policy with the weights and the aging that the settings give, where they give any."""
    if policy is not None and "weights" in settings:
        policy = replace(policy, weights=settings["weights"])
    if policy is not None and "seconds_per_class" in settings:
        offsets = tuple(level * settings["seconds_per_class"] for level in range(len(policy.offsets)))
        policy = replace(policy, offsets=offsets)
    return policy


def _pairs(text: str, option: str) -> dict[str, str]:
    pairs = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key, value = (key, value) if equals else ("order", key)
        if key in _RENAMED:
            raise OptionError(option, part, f"{key} is called {_RENAMED[key]} here")
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"settings are {', '.join(sorted(_KEYS))}"
            raise OptionError(option, part, f"there is no setting {key}: {hint}")
        if key in pairs:
            raise OptionError(option, text, f"{key} is set twice")
        pairs[key] = value
    return pairs


def _engine(option: str, given: Mapping[str, str], device: Device) -> EngineConfig:
    tokens = _integer(given["kv_tokens"]) if "kv_tokens" in given else device.kv_tokens
    values = _engine_defaults(device)
    values |= {key: _value(option, EngineConfig, key, value) for key, value in given.items() if key != "kv_tokens"}
    values.setdefault("num_blocks", tokens // values["block_size"])
    longest = device.served.engine.max_model_len if device.served else MAX_MODEL_LEN
    values.setdefault("max_model_len", min(longest, values["num_blocks"] * values["block_size"]))
    return EngineConfig(**values)


def _engine_defaults(device: Device) -> dict[str, Any]:
    """Returns the settings of the engine but for the sizes of its memory and of a context."""
    if device.served is None:
        return {"block_size": BLOCK_SIZE, "max_num_seqs": MAX_NUM_SEQS}
    names = {field.name for field in fields(EngineConfig)} - {"num_blocks", "max_model_len"}
    return {name: getattr(device.served.engine, name) for name in names}


def _value(option: str, config: type, key: str, text: str) -> object:
    try:
        return _READERS[next(field.type for field in fields(config) if field.name == key)](text)
    except ValueError as error:
        raise OptionError(option, f"{key}={text}", str(error)) from None


def _integer(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("must be a whole number")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("must be on or off")
    return text == "on"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def _optional_integer(text: str) -> int | None:
    return None if text == "off" else _integer(text)


def _optional_number(text: str) -> float | None:
    return None if text == "off" else _number(text)


def _choice(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def read(text: str) -> StrEnum:
        if text not in list(kind):
            raise ValueError(f"must be one of {', '.join(kind)}")
        return kind(text)

    return read


def _order(text: str) -> str:
    if text not in ORDERS:
        raise ValueError(f"must be one of {', '.join(ORDERS)}")
    return text


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.split("+"))


def _weights(text: str) -> dict[str, float]:
    weights = {}
    for part in text.split("+"):
        tenant, _, weight = part.rpartition(":")
        if not tenant:
            raise ValueError("write TENANT:WEIGHT, joined by +, such as gold:4+free:1")
        weights[tenant] = _number(weight)
    return weights


_READERS: dict[object, Callable[[str], object]] = {
    int: _integer,
    str: _order,
    bool: _switch,
    float: _number,
    int | None: _optional_integer,
    float | None: _optional_number,
    Mapping[str, float]: _weights,
    tuple[int, ...]: _integers,
    **{kind: _choice(kind) for kind in (Batching, BetweenTurnsRule, KVAllocation, MemoryGate, Overload, SwapRule)},
}
_RENAMED = {
    "kv_memory_bytes": "kv_tokens (the tokens for which there is memory)",
    "swap_space_bytes": "num_host_blocks (with block_copy_seconds)",
}
_SPECULATION_KEYS = {"speculate", "acceptance", "draft"}
_ENGINE_KEYS = {field.name for field in fields(EngineConfig)} - _SPECULATION_KEYS
_KEYS = _ENGINE_KEYS | {field.name for field in fields(CoreConfig)} | {"kv_tokens"} | _SPECULATION_KEYS

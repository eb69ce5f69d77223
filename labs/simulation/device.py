"""Devices that compute nothing, and return the duration of a step."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from admission.core import CoreConfig
from admission.scheduling_policy import SchedulingPolicy
from admission.step_times.idle_calibration import work_of_shape
from admission.step_times.step_time import StepTime, StepWork
from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig
from labs.simulation.arrival import ClassTarget
from labs.simulation.errors import OptionError
from labs.simulation.host import NO_TIME, HostTime

Seconds = Callable[[StepWork], float]


@dataclass(frozen=True, slots=True)
class Piece:
    """A cost that is linear in the counts of a step, in seconds a unit."""

    fixed: float
    prefill: float
    decode: float
    decode_context: float
    prefill_context: float

    def seconds(self, work: StepWork) -> float:
        return self.fixed + self.marginal(work)

    def marginal(self, work: StepWork) -> float:
        return (
            self.prefill * work.prefill_tokens
            + self.decode * work.decode_tokens
            + self.decode_context * work.decode_context
            + self.prefill_context * work.prefill_context
        )


@dataclass(frozen=True, slots=True)
class Published:
    """A device by published coefficients: one piece up to `knee` tokens in a step, another above, not continuous in
    between.
    """

    below: Piece
    above: Piece
    knee: int = 512

    def seconds(self, work: StepWork) -> float:
        piece = self.below if work.prefill_tokens + work.decode_tokens <= self.knee else self.above
        return piece.fixed + piece.marginal(work)


@dataclass(frozen=True, slots=True)
class Served:
    """The settings of a gateway that recorded its decisions."""

    core: CoreConfig
    engine: EngineConfig
    prior: tuple[StepTime, float]  # initial step times, and their weight in steps
    scheduling_policy: SchedulingPolicy | None = None  # at the end
    targets: tuple[ClassTarget, ...] = ()  # by class


@dataclass(frozen=True, slots=True)
class Device:
    """A device: the `seconds` of a step, and the `rates` that divide them among its sequences."""

    name: str
    seconds: Seconds
    rates: Piece  # without a fixed part; all >= 0
    kv_tokens: int  # capacity of its memory beside the model
    kv_bytes_per_token: float | None = None  # None: unknown
    served: Served | None = None  # the recording's settings
    host: HostTime = NO_TIME  # the server's time between two steps

    def calibration(self, engine: EngineConfig) -> list[tuple[CalibrationStep, float]]:
        """The times of an engine's calibration steps on it, in seconds."""
        steps = [step for series in calibration_series(engine) for step in series]
        return [(step, self.seconds(work_of_shape(step))) for step in steps]


# Llama-3-8B on an A100 of 80 GB: microsoft/sarathi-serve, the profile of Agrawal et al. (2024); 128 KiB of KV a token.
_LLAMA3_8B_A100 = Published(
    below=Piece(14.936e-3, 81.3e-6, 95.2e-6, 0.111e-6, 0.755e-6),
    above=Piece(5.004e-3, 95.8e-6, -14.2e-6, 0.166e-6, 2.73e-6),
)


def find_device(name: str) -> Device:
    """Returns one of `DEVICES`, or the device of a JSON file `{"coefficients": [7 of StepTime], "knee": 512,
    "kv_tokens": 430000}`, with `kv_bytes_per_token` where limits on KV memory are to be simulated, with `expert_reads`
    (`backend.roofline`) where the model has experts, and with the times
    of its `host`, where it has any: `{"step": 3e-4, "row": 5e-5, "request": 4e-4}`.

    Raises `OptionError`.
    """
    if name in DEVICES:
        return DEVICES[name]
    try:
        return _device_of(Path(name))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
        known = ", ".join(DEVICES)
        reason = f"must be one of {known} or a JSON file with coefficients, knee and kv_tokens ({error})"
        raise OptionError("--device", name, reason) from None


def device_of(
    name: str, model: StepTime, served: Served, block_bytes: int | None = None, host: HostTime = NO_TIME
) -> Device:
    """Returns the device of a recording, with the times that were learned on it."""
    kv_tokens = served.engine.num_blocks * served.engine.block_size
    token_bytes = block_bytes and block_bytes / served.engine.block_size
    return Device(name, model.seconds, _rates(model), kv_tokens, token_bytes, served, host)


def _device_of(path: Path) -> Device:
    entry = json.loads(path.read_text(encoding="utf-8"))
    in_experts, unused = entry.get("expert_reads", (0.0, 0.0))
    model = StepTime(tuple(entry["coefficients"]), int(entry.get("knee", 512)), (float(in_experts), float(unused)))
    token_bytes = float(entry["kv_bytes_per_token"]) if "kv_bytes_per_token" in entry else None
    host = HostTime(**{name: float(seconds) for name, seconds in entry.get("host", {}).items()})
    return replace(planned_device(path.stem, model, int(entry["kv_tokens"]), token_bytes), host=host)


def planned_device(name: str, model: StepTime, kv_tokens: int, kv_bytes_per_token: float | None) -> Device:
    """Returns a device that nothing was recorded on."""
    return Device(name, model.seconds, _rates(model), kv_tokens, kv_bytes_per_token)


def _rates(model: StepTime) -> Piece:
    _, prefill, decode, decode_context, prefill_context, _, _ = model.coefficients
    return Piece(0.0, prefill, decode, decode_context, prefill_context)


# This engine in bf16 on an H200 of 141 GB, as labs/benchmarks/results/gpu has it: Qwen3-0.6B on 2026-11-27, Llama-3-8B
# on 2026-11-26, since when its decodes of one row have not been measured with the kernels that they run.
_LLAMA3_8B_H200 = StepTime((4.74e-3, 15.6e-6, 12.5e-6, 32.3e-9, 32.3e-9, 1.5e-9, 6.0e-6))
_QWEN3_06B_H200 = StepTime((1.28e-3, 1.6e-6, 4.0e-6, 26.5e-9, 26.5e-9, 0.5e-9, 0.1e-6))

DEVICES = {
    device.name: device
    for device in (
        Device("llama3-8b-a100", _LLAMA3_8B_A100.seconds, _LLAMA3_8B_A100.below, 430_000, 131_072),
        Device("llama3-8b-h200", _LLAMA3_8B_H200.seconds, _rates(_LLAMA3_8B_H200), 950_000, 131_072),
        Device("qwen3-0.6b-h200", _QWEN3_06B_H200.seconds, _rates(_QWEN3_06B_H200), 1_180_000, 114_688),
    )
}

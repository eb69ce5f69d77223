"""A device whose steps take what a roofline says, for models and GPUs that nobody has measured."""

import json
from dataclasses import dataclass

from admission.simulation.device import Device, Piece
from admission.step_times.step_time import Coefficients, StepTime
from backend.roofline import MemoryPlan, Roofline


def step_time_of(roofline: Roofline, overlaps: bool = False) -> StepTime:
    """Returns the roofline as coefficients of `StepTime`: the weights are read once a step, and keys and values for
    each token of context; each token of a prompt attends to those before it, which the floor of a step leaves out.
    Windows are not counted.

    Where reading the weights `overlaps` with products, tokens up to the ridge cost nothing: that is the floor. No
    measured device is like that: on an A100 each token of a prompt costs 81 microseconds from the first one on, of
    which the products are 60 (Llama-3-8B: Agrawal et al., 2024). Otherwise products follow on reading.
    """
    footprint, model = roofline.footprint, roofline.footprint.model
    weights = footprint.num_multiplied * footprint.item_bytes / roofline.peaks.bandwidth
    token = 2 * footprint.num_multiplied / roofline.rate + roofline.exchange(1)
    context = footprint.kv_bytes_per_token / roofline.peaks.bandwidth
    pair = 4 * model.num_layers * model.num_heads * model.head_dim / roofline.rate
    if overlaps:
        return StepTime((weights, 0.0, 0.0, context, 0.0, pair, token), max(1, round(roofline.ridge)))
    return StepTime((weights, token, token, context, 0.0, pair, 0.0))


@dataclass(frozen=True, slots=True)
class RooflineDevice:
    """What a plan says of a model on a GPU, as a simulation takes it."""

    name: str
    step_time: StepTime
    kv_tokens: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, name: str, roofline: Roofline, plan: MemoryPlan, overlaps: bool = False) -> "RooflineDevice":
        return cls(name, step_time_of(roofline, overlaps), plan.kv_tokens, plan.footprint.kv_bytes_per_token)

    @property
    def device(self) -> Device:
        _, prefill, decode, context, _, _, beyond = self.step_time.coefficients
        rates = Piece(0.0, prefill + beyond, decode + beyond, context, 0.0)
        return Device(self.name, self.step_time.seconds, rates, self.kv_tokens, self.kv_bytes_per_token)

    def to_json(self) -> str:
        """Returns the file that `find_device` reads."""
        coefficients: Coefficients = self.step_time.coefficients
        entry = {
            "coefficients": coefficients,
            "knee": self.step_time.knee,
            "kv_tokens": self.kv_tokens,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }
        return json.dumps(entry, indent=2) + "\n"

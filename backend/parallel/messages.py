"""Messages of rank 0 to the other ranks. A step is sent as a tuple, so that compiled and interpreted cores agree."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from backend.config import EngineOptions
from backend.scheduler.batch import Batch, NewSequence

MEET: Literal["meet"] = "meet"  # every rank has loaded its part of the model
WARM_UP: Literal["warm up"] = "warm up"
STOP: Literal["stop"] = "stop"
Message = Literal["meet", "warm up", "stop"] | tuple[Any, ...]
"""A message is one of these words, or a step as `encoded` returns it."""

_OF_BATCH = [field.name for field in fields(Batch)]
_OF_SEQUENCE = [field.name for field in fields(NewSequence)]


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The first message to a rank: how to load its part of the model."""

    rank: int
    size: int
    meeting_place: Path  # a file that all ranks can reach
    directory: Path  # the model's
    options: EngineOptions
    dtype: str  # such as "bfloat16"
    device: torch.device  # the device of rank 0
    kernels: str
    threads: int  # threads on a CPU


def encoded(batch: Batch) -> tuple[Any, ...]:
    """Return a batch as a tuple that `decoded` takes."""
    values = {name: getattr(batch, name) for name in _OF_BATCH}
    values["admitted"] = [tuple([getattr(new, name) for name in _OF_SEQUENCE]) for new in batch.admitted]
    return tuple(values.values())


def decoded(message: tuple[Any, ...]) -> Batch:
    values = dict(zip(_OF_BATCH, message, strict=True))
    values["admitted"] = [NewSequence(*new) for new in values["admitted"]]
    return Batch(**values)

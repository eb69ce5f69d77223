"""Random adapters in PEFT's format, and models with their weights merged: the oracle of the tests of adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from labs.benchmarks.adapters import MODULES, save_adapter
from tests.backend.families import random_model


def products(model: PreTrainedModel, modules: Sequence[str]) -> dict[str, Tensor]:
    """The weights of the model's products of these modules, by the names of their modules."""
    found = {name.removesuffix(".weight"): weight for name, weight in model.named_parameters()}
    return {name: weight for name, weight in found.items() if name.split(".")[-1] in modules}


def random_tensors(model: PreTrainedModel, rank: int, modules: Sequence[str], seed: int) -> dict[str, Tensor]:
    """A and B of each product, strong enough to change most tokens."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, weight in products(model, modules).items():
        outputs, inputs = weight.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn((rank, inputs), generator=generator)
        b = torch.randn((outputs, rank), generator=generator) * (0.5 / (inputs * rank) ** 0.5)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return tensors


def random_adapter(
    family: str, directory: Path, rank: int = 4, modules: Sequence[str] = MODULES, seed: int = 1, **keys: Any
) -> Path:
    return save_adapter(directory, random_tensors(random_model(family), rank, modules, seed), rank, **keys)


def merged_model(
    family: str, rank: int = 4, modules: Sequence[str] = MODULES, seed: int = 1, scale: float = 2.0
) -> PreTrainedModel:
    """The model with W + scale * B A for each W."""
    model = random_model(family)
    tensors = random_tensors(model, rank, modules, seed)
    with torch.no_grad():
        for name, weight in products(model, modules).items():
            a, b = (tensors[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
            weight.add_(scale * b @ a)
    return model

"""Bytes of the device's memory by what they are used for."""

import torch

from backend.loader import LoadedModel


def memory_by_use(model: LoadedModel) -> dict[str, float]:
    weights = model.num_parameters * model.dtype.itemsize
    device = model.runner.device
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    other = max(0, reserved - weights - model.kv_bytes)
    return {"weights": weights, "kv_cache": model.kv_bytes, "other": other}

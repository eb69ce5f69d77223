"""The engine package: `LLM` is for offline use, and the gateway builds on `backend.engine.Engine`.

The names below are imported when first used: they import torch, which the command line's help does not need.
"""

from importlib import import_module
from typing import Any

_HOMES = {"LLM": "backend.llm", "Completion": "backend.llm", "SamplingParams": "backend.sampling_params"}

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'backend' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

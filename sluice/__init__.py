"""This package is the one name to import Sluice by: `from sluice import LLM, SamplingParams`.

The five packages that Sluice is made of (`fleet`, `gateway`, `admission`, `quotas` and `backend`) have names that other
distributions may use too. This package holds none of their code: it checks that they are Sluice's own and exports
what is meant for users.
"""

from importlib import import_module
from typing import Any

from sluice.conflicts import check_packages

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: it brings torch, which the command line's help does not need."""
    if name not in __all__:
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    check_packages()
    import_module("backend.compiled_core").use()
    return getattr(import_module("backend"), name)

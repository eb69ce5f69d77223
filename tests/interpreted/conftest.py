"""Triton kernels in its interpreter, chosen when Triton is imported: tests of `triton_ops` run this folder."""

import inspect
import os
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest

from tests.backend.kernels.conftest import poisoned_memory

__all__ = ["poisoned_memory"]

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _names_of_the_language_are_listed_once() -> Iterator[None]:
    """At each call within a kernel Triton lists them all to find those to patch, for half of all the time."""
    from triton.language.core import is_builtin  # noqa: PLC0415 - its interpreter is chosen by then
    from triton.runtime import interpreter  # noqa: PLC0415

    @cache
    def names(package: ModuleType | type) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: ModuleType | type, builder: object, scope: object) -> None:
        for name in names(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtins)
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory: None) -> None:
    """Give every test here memory that holds NaN."""

"""Adapters that requests name, of several models."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backend.adapter import Adapter, make_adapter
from backend.adapter_registry import AdapterRegistry
from backend.errors import ModelLoadError
from gateway.api.adapters import ServedAdapters
from gateway.errors import ModelNotFound


class PaperRegistry:
    def __init__(self) -> None:
        self.held: dict[str, Adapter] = {}

    def read(self, path: Path, number: int) -> object:
        return SimpleNamespace(blocks=[number])

    def add(self, name: str, path: Path, weights: object, number: int) -> object:
        self.held[name] = make_adapter(name, str(path), number, 1)
        return SimpleNamespace(adapter=self.held[name], created=0)

    def get(self, name: str) -> Adapter | None:
        return self.held.get(name)

    def remove(self, name: str) -> None:
        del self.held[name]


async def test_a_request_never_gets_an_adapter_of_another_model_than_its_own() -> None:
    served = ServedAdapters(cast(AdapterRegistry, PaperRegistry()), ["first", "second"])
    await served.load("law", Path("a"), "first")
    with pytest.raises(ModelLoadError, match=r"'law' is an adapter of the model 'first': .* 'second' another name"):
        await served.load("law", Path("b"), "second")
    assert served.named(None, 1) is None
    old = served.named("law", 0)
    assert old is not None and old.digest == "a"
    await served.unload("law")
    await served.load("law", Path("b"), "second")
    with pytest.raises(ModelNotFound, match="'law' does not exist any more"):  # read while it was the first model's
        served.named("law", 0)
    new = served.named("law", 1)
    assert new is not None and new.digest == "b"

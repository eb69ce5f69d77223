"""The adapters that requests may name as their model, loaded at start and while the gateway serves."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from backend.adapter import Adapter
from backend.adapter_registry import AdapterRegistry, LoadedAdapter
from gateway.api.frontend import AdapterCard
from gateway.errors import ModelNotFound
from gateway.quoting import quoted
from gateway.settings.settings import Settings


class ServedAdapters:
    """Loads and unloads adapters. Requests that named one before it was unloaded or replaced are served with it.

    `cards` is one mapping, which changes in place. The caller makes sure that no model has the name of an adapter.
    """

    def __init__(self, registry: AdapterRegistry) -> None:
        self.registry = registry
        self.cards: dict[str, AdapterCard] = {}
        self.on_change: list[Callable[[Mapping[str, AdapterCard]], Awaitable[None]]] = []
        self._loading = asyncio.Lock()

    async def load(self, name: str, path: Path) -> LoadedAdapter:
        """Load the adapter of a directory under this name, in the place of another. Raises `ModelLoadError`."""
        async with self._loading:  # one in memory at a time that may turn out to be unfit
            loaded = self.registry.add(name, path, await asyncio.to_thread(self.registry.read, path))
            self.cards[name] = AdapterCard(name, loaded.created, loaded.adapter.num_blocks)
            await self._changed()
        return loaded

    async def unload(self, name: str) -> None:
        """Let no further request name the adapter. Raises `KeyError`."""
        async with self._loading:
            self.registry.remove(name)
            del self.cards[name]
            await self._changed()

    def named(self, name: str | None) -> Adapter | None:
        """Return the adapter of a request. Raises `ModelNotFound` if it was unloaded since the request was read."""
        if name is None:
            return None
        adapter = self.registry.get(name)
        if adapter is None:
            raise ModelNotFound(f"The model {quoted(name, 200)} does not exist any more.", "model")
        return adapter

    async def _changed(self) -> None:
        for tell in self.on_change:
            await tell(self.cards)


async def load_adapters(settings: Settings, registry: AdapterRegistry) -> ServedAdapters:
    """Load the adapters that the settings name. Raises `ModelLoadError` and `ConfigError`."""
    adapters = ServedAdapters(registry)
    for name, path in settings.named_adapters.items():
        await adapters.load(name, path)
    return adapters

"""The adapters that requests may name as their model, loaded at start and while the gateway serves."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from pathlib import Path

from backend.adapter import Adapter
from backend.adapter_registry import AdapterRegistry, LoadedAdapter
from backend.errors import ConfigError, ModelLoadError
from gateway.api.frontend import AdapterCard
from gateway.errors import ModelNotFound
from gateway.quoting import quoted
from gateway.settings.settings import Settings


class ServedAdapters:
    """Loads and unloads adapters. Requests that named one before it was unloaded or replaced are served with it.

    `cards` is one mapping, which changes in place. The caller makes sure that no model has the name of an adapter.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        models: Sequence[str],
        problem: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """`models`: the names of the registry's. `problem` says why the policy's floors and pins leave no room for an
        adapter of that many blocks, if they do not.
        """
        self.registry, self.models = registry, models
        self._problem = problem
        self.cards: dict[str, AdapterCard] = {}
        self.on_change: list[Callable[[Mapping[str, AdapterCard]], Awaitable[None]]] = []
        self._loading = asyncio.Lock()

    async def load(self, name: str, path: Path, model: str) -> LoadedAdapter:
        """Load the adapter of a directory for the model of that name, in the place of another adapter of it. Raises
        `ModelLoadError`.
        """
        number = self.models.index(model)
        async with self._loading:  # one in memory at a time that may turn out to be unfit
            if name in self.cards and (held := self.cards[name].model) != model:
                raise ModelLoadError(
                    f"{quoted(name, 200)} is an adapter of the model {held!r}: unload it first, or give the adapter of "
                    f"{model!r} another name"
                )
            weights = await asyncio.to_thread(self.registry.read, path, number)
            if (problem := self._problem(len(weights.blocks))) is not None:
                raise ModelLoadError(f"{path}: {problem}")
            loaded = self.registry.add(name, path, weights, number)
            self.cards[name] = AdapterCard(name, model, loaded.created, loaded.adapter.num_blocks)
            await self._changed()
        return loaded

    async def unload(self, name: str) -> None:
        """Let no further request name the adapter. Raises `KeyError`."""
        async with self._loading:
            self.registry.remove(name)
            del self.cards[name]
            await self._changed()

    @property
    def largest(self) -> int:
        """The blocks of the largest adapter."""
        cards = [*self.cards.values()]  # at once: a thread may ask, which reads a policy
        return max([card.kv_blocks for card in cards], default=0)

    def of_first(self, name: str) -> Adapter | None:
        """Return the adapter of that name if it is one of the first model's."""
        card = self.cards.get(name)
        return self.registry.get(name) if card is not None and card.model == self.models[0] else None

    def named(self, name: str | None, number: int) -> Adapter | None:
        """Return the adapter of a request for the model of that number. Raises `ModelNotFound` if it was unloaded since
        the request was read, and perhaps another model's loaded.
        """
        if name is None:
            return None
        adapter = self.registry.get(name)
        if adapter is None or self.cards[name].model != self.models[number]:
            raise ModelNotFound(f"The model {quoted(name, 200)} does not exist any more.", "model")
        return adapter

    async def _changed(self) -> None:
        for tell in self.on_change:
            await tell(self.cards)


async def load_adapters(settings: Settings, adapters: ServedAdapters, taken: Container[str]) -> None:
    """Load the adapters that the settings name, none of which may be `taken` by a model. Raises `ModelLoadError` and
    `ConfigError`.
    """
    for name, (model, path) in settings.named_adapters.items():
        if name in taken:
            raise ConfigError(f"--adapter {name}: an embedding or score model has that name; give the adapter another")
        await adapters.load(name, path, model)

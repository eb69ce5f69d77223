"""The adapters that requests may name. Their weights stay in the host's memory until the last sequence that uses them
has ended.
"""

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from backend.adapter import Adapter, make_adapter
from backend.errors import ConfigError, ModelLoadError
from backend.loader import LoadedModel
from backend.model.adapter_checkpoint import AdapterWeights, read_adapter
from backend.roofline import show_bytes


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that may be named, and where it comes from."""

    adapter: Adapter
    model: int  # the number of its model in the engine
    path: Path
    rank: int
    created: int  # Unix seconds
    num_bytes: int


class AdapterRegistry:
    """Adapters by name. One owner adds and removes; `read` may run in a thread of its own."""

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        """`models`: of the engine, by number."""
        self._models = models
        self._numbers = count(1)
        self._loaded: dict[str, LoadedAdapter] = {}

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        return self._loaded

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(self._loaded.values())

    def get(self, name: str) -> Adapter | None:
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.adapter

    def read(self, path: Path, number: int = 0) -> AdapterWeights:
        """Read and check an adapter of the model of that number. Raises `ModelLoadError`, and `ConfigError` if the
        engine serves none.
        """
        model = self._models[number]
        config, tables = model.engine_config, model.runner.adapters
        if tables is None:
            raise ConfigError("this engine serves no adapters: max_adapter_rank is 0")
        weights = read_adapter(path, model.config, model.dtype, config.max_adapter_rank, tables.block_numbers)
        needed = len(weights.blocks) + config.kv_blocks(config.max_model_len)
        if needed > config.num_blocks:
            each = model.kv_bytes // config.num_blocks
            raise ModelLoadError(
                f"{path}: its weights take {show_bytes(len(weights.blocks) * each)} of KV memory, and a sequence of "
                f"{config.max_model_len} tokens beside it the rest of {show_bytes(needed * each)}: raise "
                f"kv_memory_bytes, which is {show_bytes(model.kv_bytes)}, to at least that, or lower max_model_len"
            )
        return weights

    def add(self, name: str, path: Path, weights: AdapterWeights, number: int = 0) -> LoadedAdapter:
        """Let requests name an adapter that was read for the model of that number. One of the same name is replaced,
        and serves the requests that have named it to their ends.
        """
        tables = self._models[number].runner.adapters
        assert tables is not None
        adapter = make_adapter(name, weights.digest, next(self._numbers), len(weights.blocks))
        tables.add(adapter.number, weights)
        weakref.finalize(adapter, tables.remove, adapter.number).atexit = False
        loaded = LoadedAdapter(adapter, number, path, weights.rank, int(time.time()), weights.blocks.nbytes)
        self._loaded[name] = loaded
        return loaded

    def remove(self, name: str) -> None:
        """Let no further request name this adapter. Raises `KeyError`."""
        del self._loaded[name]

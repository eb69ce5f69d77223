"""Layer groups: the layers whose keys and values lie together in one block of the pool.

Layers with a window need keys and values of the last tokens alone. Where a model has many of them, a block holds tokens
of one group of layers, each group has blocks of its own, and all blocks have the same size, so that one pool serves all
groups (vLLM's hybrid KV cache manager). The first group has every layer without a window, and is never freed behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

MAX_UNUSED_SHARE = Fraction(1, 8)  # of the layers' bytes, in the last group's blocks
GROUPS_WITHOUT_FULL_LAYERS = 4


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The place of each layer's keys and values: in the block of its group, and there."""

    size: int  # layers of a group
    places: tuple[tuple[int, int], ...]  # by layer, its group and its index in a block of that

    @property
    def num_windows(self) -> int:
        """The groups behind the first, whose layers all have a window."""
        return max(group for group, _ in self.places)


def one_group(num_layers: int) -> LayerGroups:
    """Return all layers in one group."""
    return LayerGroups(num_layers, tuple((0, layer) for layer in range(num_layers)))


class WindowedLayers(Protocol):
    """The properties of a model that decide which of its layers share blocks."""

    @property
    def num_layers(self) -> int: ...

    @property
    def sliding_window(self) -> int | None: ...

    def window(self, layer: int) -> int | None: ...


def groups_of(model: WindowedLayers, longest: int, room: int = 0) -> LayerGroups:
    """Return the groups of a model's layers where no text is longer than `longest` tokens; `room` as `layer_groups`."""
    if model.sliding_window is None or longest <= 2 * model.sliding_window:
        return one_group(model.num_layers)
    return layer_groups([model.window(layer) for layer in range(model.num_layers)], room)


def layer_groups(windows: Sequence[int | None], room: int = 0) -> LayerGroups:
    """Return the groups for the windows of all layers; one group where others would leave too much of it unused.

    The first group takes the least that holds every layer without a window, so that as much as possible is freed. Of a
    block that has room for more layers, because other models share it, groups take as much as they can.
    """
    count, full = len(windows), sum(window is None for window in windows)
    least = full or -(-count // GROUPS_WITHOUT_FULL_LAYERS)
    sizes = [size for size in range(least, count) if -(-count // size) * size - count <= MAX_UNUSED_SHARE * count]
    if not sizes or room >= count:
        return one_group(count)
    size = max([one for one in sizes if one <= room], default=sizes[0])
    spare = iter(range(size - full))  # places of the first group that layers with a window take
    kept, freed = iter(range(size)), iter(range(count))
    places = list[tuple[int, int]]()
    for window in windows:
        if window is None or next(spare, None) is not None:
            places.append((0, next(kept)))
        else:
            index = next(freed)
            places.append((1 + index // size, index % size))
    return LayerGroups(size, tuple(places))

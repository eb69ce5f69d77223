"""An adapter as the scheduler knows it: a name, and the blocks that its weights take. It is data without tensors."""

from dataclasses import dataclass, field

from backend.paged_kv.block_names import BlockName


class AdapterBlockName(BlockName):
    """The name of one block of an adapter's weights. The host keeps the weights: the block is never swapped."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Adapter:
    """One loading of an adapter, compared by identity: what is loaded anew under its name is another adapter.

    Sequences refer to it as long as they live, so that an unloaded or replaced adapter serves them to their end.
    """

    name: str
    digest: str  # of its weights, by which blocks of keys and values are kept apart
    number: int  # of all loadings of this process
    block_names: tuple[AdapterBlockName, ...] = field(repr=False)

    @property
    def num_blocks(self) -> int:
        return len(self.block_names)


def make_adapter(name: str, digest: str, number: int, num_blocks: int) -> Adapter:
    """Make an adapter whose blocks have names of their own."""
    return Adapter(name, digest, number, tuple(AdapterBlockName(index) for index in range(1, num_blocks + 1)))

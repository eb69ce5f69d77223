"""A block table: the KV blocks that a sequence holds, and the account of its tenant's charge for them."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, of its window, or of its adapter; compared by identity.

    `Holdings` writes it; `BlockTables` counts names. A block shared by several sequences of a tenant is on one account
    at a time, so that the accounts add up to the blocks that the tenant held.
    """

    owner: str  # id of the sequence
    tenant: str
    blocks: list[int] = field(default_factory=list)
    first: int = 0  # of a window: the first place that it holds
    num_shared: int = 0  # blocks also held by other tables
    num_charged: int = 0  # blocks charged on this account; other accounts of the tenant pay for the rest
    peak: int = 0  # most blocks at a time
    block_seconds: float = 0.0  # charged until `counted_at`
    counted_at: float = 0.0  # seconds of the engine's clock
    window: "BlockTable | None" = None  # of a text: the blocks of its window; None: it never had some
    num_told_names: int = 0  # of its blocks, names given at arrival or reported by `BlockTables.newly_named`

    @property
    def of_window(self) -> "BlockTable":
        """The table of the text's window, which is made when it is first asked for."""
        if self.window is None:
            self.window = BlockTable(self.owner, self.tenant)
        return self.window

    @property
    def num_unpaid(self) -> int:
        """Blocks charged on another account of the tenant."""
        return len(self.blocks) - self.num_charged

    def seconds(self, now: float) -> float:
        """Return the block-seconds charged until `now`."""
        return self.block_seconds + self.num_charged * (now - self.counted_at)

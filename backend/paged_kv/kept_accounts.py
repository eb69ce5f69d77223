"""Accounts of idle blocks that floors and pins keep: block-seconds by tenant."""

from collections import Counter


class KeptAccounts:
    """Counts unevictable idle blocks by the tenants whose floor or pin keeps them.

    A block that two tenants have pinned is on the account of both.
    """

    def __init__(self) -> None:
        self.now = 0.0  # seconds of the engine's clock, set by the owner of the clock
        self._blocks: dict[str, int] = {}
        self._block_seconds: dict[str, float] = {}  # until `_since`
        self._since: dict[str, float] = {}

    def add(self, tenant: str, blocks: int) -> None:
        """Keep `blocks` more for the tenant from now on; negative: fewer."""
        before = self._blocks.get(tenant, 0)
        if before:
            self._block_seconds[tenant] = self.block_seconds(tenant, self.now)
        self._since[tenant] = self.now
        self._blocks[tenant] = before + blocks
        assert self._blocks[tenant] >= 0, "fewer blocks than none are kept"

    def blocks(self) -> Counter[str]:
        """Return the kept blocks of each tenant."""
        return +Counter(self._blocks)

    def block_seconds(self, tenant: str, now: float) -> float:
        """Return the block-seconds kept for the tenant until `now`."""
        held = self._blocks.get(tenant, 0)
        return self._block_seconds.get(tenant, 0.0) + (held * (now - self._since[tenant]) if held else 0.0)

    def all_block_seconds(self, now: float) -> dict[str, float]:
        """Return the block-seconds of each tenant for which any block was ever kept."""
        return {tenant: self.block_seconds(tenant, now) for tenant in self._blocks}

"""The map of KV memory: each block's owner and use."""

import asyncio
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np

from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

FREE = -1

TenantBlocks = tuple[str, list[int]]
"""A tenant, and blocks of one of its sequences, or all its idle blocks."""


class Use(IntEnum):
    """The use of an allocated block."""

    HELD = 0  # by one sequence
    SHARED = 1  # by several sequences, perhaps of several tenants: shown as the first one's
    CACHED = 2  # idle, shown as its last holder's
    PINNED = 3  # idle and pinned by the policy, perhaps for several tenants: shown as the first one's


async def kv_map(scheduler: Scheduler, block_bytes: int) -> dict[str, Any]:
    """Runs of KV blocks with the same owner and use, by block number, and each tenant's blocks elsewhere.

    The event loop only copies block tables; a thread computes the runs, of which a large pool has many.
    """
    config, blocks = scheduler.config, scheduler.kv_manager.blocks
    accounts = KVAccounts(scheduler.kv_manager)
    swapped, kept = dict(accounts.host.held), dict(+accounts.cache.kept_by_tenant())
    holders = _holders(scheduler)
    held = [(table.tenant, list(table.blocks)) for sequence in holders for table in sequence.tables]
    idle, pinned = list(blocks.cache.idle_blocks()), list(blocks.pinned_prefixes.idle_blocks())
    layers = (
        (idle, Use.CACHED, 0),
        (pinned, Use.PINNED, 0),
        (held, Use.HELD, 1),
    )
    owners, runs = await asyncio.to_thread(_drawn, config.num_blocks, layers)
    return {
        "num_blocks": config.num_blocks,
        "block_bytes": block_bytes,
        "block_tokens": config.block_size,
        "owners": owners,
        "runs": runs,
        "kept": kept,
        "swapped": swapped,
        "host_blocks": accounts.host.num_blocks,
    }


def _drawn(num_blocks: int, layers: Iterable[tuple[list[TenantBlocks], Use, int]]) -> tuple[list[str], list[list[int]]]:
    """The owners, and runs: an owner's index, a number of blocks, and their use.

    A layer has blocks, their use, and True if each counts as held: a block held twice is shared.
    """
    owners: dict[str, int] = {}
    owner = np.full(num_blocks, FREE, dtype=np.int64)
    use, holders = np.zeros((2, num_blocks), dtype=np.int64)
    for table, drawn, counts in layers:
        for tenant, blocks in reversed(table):  # the first owner overwrites the others
            owner[blocks] = owners.setdefault(tenant, len(owners))
            use[blocks] = drawn
            holders[blocks] += counts
    use[holders > 1] = Use.SHARED
    changes = np.flatnonzero((np.diff(owner) != 0) | (np.diff(use) != 0))
    ends = np.append(changes + 1, num_blocks)
    runs: list[list[int]] = np.column_stack((owner[ends - 1], np.diff(ends, prepend=0), use[ends - 1])).tolist()
    return list(owners), runs


def _holders(scheduler: Scheduler) -> list[Sequence]:
    """The sequences that hold blocks: running ones, and ended ones named by a step in flight."""
    held = dict.fromkeys(scheduler.running.values())
    for scheduled in scheduler.in_flight:
        held |= dict.fromkeys(scheduled.sequences)
    return [sequence for sequence in held if sequence.block_table.blocks]

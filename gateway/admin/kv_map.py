"""A picture of the KV pool: who has which block."""

import asyncio
from typing import Any

import numpy as np

from backend.scheduler import Scheduler
from backend.sequence import Sequence

FREE = -1

Holding = tuple[str, list[int]]
"""A tenant, and blocks of one of its sequences."""


async def kv_map(scheduler: Scheduler, block_bytes: int) -> dict[str, Any]:
    """Runs of blocks with the same owner, by block number. The event loop copies block tables; a thread draws."""
    config = scheduler.config
    holdings = [(sequence.tenant, list(sequence.block_table)) for sequence in _holders(scheduler)]
    owners, runs = await asyncio.to_thread(_drawn, config.num_blocks, holdings)
    return {
        "num_blocks": config.num_blocks,
        "block_bytes": block_bytes,
        "block_tokens": config.block_size,
        "owners": owners,
        "runs": runs,
    }


def _drawn(num_blocks: int, holdings: list[Holding]) -> tuple[list[str], list[list[int]]]:
    """The owners, and runs of one owner's index and a number of blocks."""
    owners: dict[str, int] = {}
    blocks = np.full(num_blocks, FREE, dtype=np.int64)
    for tenant, held in holdings:
        blocks[held] = owners.setdefault(tenant, len(owners))
    ends = np.append(np.flatnonzero(np.diff(blocks)) + 1, num_blocks)
    runs: list[list[int]] = np.column_stack((blocks[ends - 1], np.diff(ends, prepend=0))).tolist()
    return list(owners), runs


def _holders(scheduler: Scheduler) -> list[Sequence]:
    """Those that run, and those that are over and wait for a step in flight to let go of their blocks."""
    held = dict.fromkeys(scheduler.running.values())
    for flight in scheduler.in_flight:
        held |= dict.fromkeys(flight.sequences)
    return [sequence for sequence in held if sequence.block_table]

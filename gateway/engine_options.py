"""What the settings wish for the engine."""

from backend.config import Batching, KVAllocation
from backend.sizing import EngineOptions
from gateway.settings import Settings


def engine_options(settings: Settings) -> EngineOptions:
    return EngineOptions(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        prefill_chunk=settings.prefill_chunk,
        block_size=settings.block_size,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_memory_bytes=settings.kv_memory_bytes,
        kv_memory_fraction=settings.kv_memory_fraction,
        batching=Batching(settings.batching),
        kv_allocation=KVAllocation(settings.kv_allocation),
    )

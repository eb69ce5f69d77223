"""Adds the published rules to `backend.scheduler.batching.RULES` once it is imported."""

from backend.config import Batching
from backend.scheduler.batching import RULES
from labs.batchings.multilevel_feedback import MultilevelFeedback
from labs.batchings.nested_wait import NestedWait
from labs.batchings.prefill_first import PrefillFirst
from labs.batchings.slai import SLAI
from labs.batchings.static import PaddedStaticBatching, StaticBatching
from labs.batchings.wait import Wait
from labs.batchings.window import WindowBatching

RULES |= {
    Batching.STATIC: StaticBatching,
    Batching.STATIC_PADDED: PaddedStaticBatching,
    Batching.SLAI: SLAI,
    Batching.WINDOW: WindowBatching,
    Batching.PREFILL_FIRST: PrefillFirst,
    Batching.WAIT: Wait,
    Batching.NESTED_WAIT: NestedWait,
    Batching.MULTILEVEL_FEEDBACK: MultilevelFeedback,
}

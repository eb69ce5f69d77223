"""The batching rules by name. A new rule needs a module, and a line here and in `Batching`."""

from backend.config import Batching
from backend.scheduler.batching.multilevel_feedback import MultilevelFeedback
from backend.scheduler.batching.nested_wait import NestedWait
from backend.scheduler.batching.prefill_first import PrefillFirst
from backend.scheduler.batching.rule import BatchingRule
from backend.scheduler.batching.slai import SLAI
from backend.scheduler.batching.static import PaddedStaticBatching, StaticBatching
from backend.scheduler.batching.wait import Wait
from backend.scheduler.batching.window import WindowBatching

RULES: dict[Batching, type[BatchingRule]] = {
    Batching.CONTINUOUS: BatchingRule,
    Batching.STATIC: StaticBatching,
    Batching.STATIC_PADDED: PaddedStaticBatching,
    Batching.SLAI: SLAI,
    Batching.WINDOW: WindowBatching,
    Batching.PREFILL_FIRST: PrefillFirst,
    Batching.WAIT: Wait,
    Batching.NESTED_WAIT: NestedWait,
    Batching.MULTILEVEL_FEEDBACK: MultilevelFeedback,
}

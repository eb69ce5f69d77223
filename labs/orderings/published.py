"""Adds the published orders to `admission.core.ORDERS` once it is imported."""

from admission.core import ORDERS, CoreConfig, OrderParts
from admission.keyed_order import KeyedOrder
from admission.order import WaitingOrder
from backend.scheduler.sequence import Sequence
from labs.orderings.adaptive_lifo import AdaptiveLifo
from labs.orderings.by_tenant import RequestRoundRobin, VirtualTokenCounter
from labs.orderings.learned_rank import LearnedRank
from labs.orderings.length_groups import LengthGroups
from labs.orderings.magnus import Magnus
from labs.orderings.ordering import PublishedOrder
from labs.orderings.predicted import Predicted
from labs.orderings.response_ratio import HighestResponseRatioNext
from labs.orderings.shortest_first import ShortestFirst
from labs.orderings.virtual_finish import VirtualFinishWithBoost


def _deadline(config: CoreConfig, sequence: Sequence) -> float:
    """The due time of its first token; without a deadline by its class, the most urgent by `seconds_per_class`."""
    own = sequence.arrival + (sequence.request.priority_class + 1) * config.seconds_per_class
    return own if sequence.request.first_token_by is None else sequence.request.first_token_by


def _earliest_deadline(parts: OrderParts) -> WaitingOrder:
    """Earliest deadline first (Liu and Layland, 1973). Admission by deadline expires late requests."""
    return KeyedOrder(lambda sequence: _deadline(parts.config, sequence), parts.uncached)


def _least_laxity(parts: OrderParts) -> WaitingOrder:
    """Least laxity first (Dertouzos and Mok, 1989): the time until the first token is due, less the prefill's.

    It falls at one pace for all, so the order is that of the latest possible prefill starts. An admitted request goes
    on, where the textbook's rule switches whenever laxities cross.
    """

    def latest_start(sequence: Sequence) -> float:
        prefill = parts.tariffs.estimate(sequence, 0.0, sequence.num_found_tokens)
        return _deadline(parts.config, sequence) - prefill

    return KeyedOrder(latest_start, parts.uncached)


def _learned_rank(parts: OrderParts) -> WaitingOrder:
    predicted = Predicted(parts)
    return PublishedOrder(LearnedRank(predicted.output), parts.uncached, predicted)


def _response_ratio(parts: OrderParts) -> WaitingOrder:
    predicted = Predicted(parts)
    return PublishedOrder(HighestResponseRatioNext(predicted.seconds), parts.uncached, predicted)


def _magnus(parts: OrderParts) -> WaitingOrder:
    predicted, engine = Predicted(parts), parts.engine
    memory = engine.num_blocks * engine.block_size
    batches = Magnus(predicted.output, predicted.seconds, memory, engine.max_num_seqs)
    return PublishedOrder(batches, parts.uncached, predicted)


ORDERS |= {
    "round_robin": lambda parts: PublishedOrder(RequestRoundRobin(), parts.uncached),
    "shortest_first": lambda parts: PublishedOrder(ShortestFirst(parts.cost), parts.uncached),
    "vtc": lambda parts: PublishedOrder(VirtualTokenCounter(parts.share, parts.cost), parts.uncached),
    "virtual_finish": lambda parts: PublishedOrder(VirtualFinishWithBoost(parts.share, parts.cost), parts.uncached),
    "earliest_deadline": _earliest_deadline,
    "adaptive_lifo": lambda parts: PublishedOrder(AdaptiveLifo(), parts.uncached),
    "learned_rank": _learned_rank,
    "length_groups": lambda parts: PublishedOrder(LengthGroups(), parts.uncached),
    "least_laxity": _least_laxity,
    "response_ratio": _response_ratio,
    "magnus": _magnus,
}

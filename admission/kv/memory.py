"""The memory gate: a newcomer joins if it fits the KV memory beside the future growth of the running sequences.

Past-Future (Gong et al., 2025): memory is at its fullest just before some sequence ends. With sequences sorted by
remaining output, longest first, the demand when the i-th ends is the sum over the first i; the largest demand is the
future peak. Lengths are random, so a quantile of the sum is compared with the pool, not the sum of quantiles.
"""

from collections.abc import Callable, Iterable
from math import ceil, inf

from admission.output_length import OutputLengths
from backend.config import EngineConfig
from backend.scheduler.sequence import Sequence

ENDED_LENGTH_QUANTILE = 0.9  # of the output lengths like a newcomer's, at which it is assumed to have ended

Gate = Callable[[Sequence, Iterable[Sequence], int, int, int], bool]
"""Returns True if a newcomer may join, from the newcomer, the running sequences, the free blocks, the newcomer's blocks
that others hold, and the blocks kept for other tenants. Its present tokens are known to fit.
"""


MEMORY_RISK_DEVIATIONS = -1.0
"""The standard deviations above the mean demand that have to fit the pool for a newcomer to join. It is below the mean:
a preemption costs little, because the victim keeps its computed blocks while they stay cached. Beside 1.28, the 90th
percentile of a normal sum, throughput was 0.98 to 0.99 of that of admission without a forecast instead of 0.95 to 0.97
on conversations, with 0.4 to 1.0 of its preemptions, and 0.91 to 0.97 instead of 0.85 to 0.91 where answers are long,
with 0.3 to 0.4 of them; nothing changed where lengths are declared (`labs.benchmarks.preemption` and three other mixes
of lengths, three seeds each, with the prefix cache and without; simulated).
"""
LEASE_CAUTION_DEVIATIONS = 1.28  # the same for a tenant's lease, where no other tenant's sequences can be preempted


class FuturePeak:
    """Admits while the future peak stays within the pool: mean demand plus `deviations` of its standard deviation.

    A shared block counts once, and as if held until the last sequence ends.
    """

    def __init__(
        self, config: EngineConfig, lengths: OutputLengths, deviations: float = MEMORY_RISK_DEVIATIONS
    ) -> None:
        self._capacity = config.num_blocks * config.block_size
        self._block_size = config.block_size
        self._slack = config.block_size / 2  # a sequence's last block is half empty on average
        self._config, self._has_windows = config, config.most_window_groups > 0
        self._lengths = lengths
        self._deviations = deviations

    def __call__(
        self, sequence: Sequence, running: Iterable[Sequence], num_free: int, num_held: int, num_kept: int
    ) -> bool:
        everyone = [sequence, *running]
        capacity = self._capacity - num_kept * self._block_size
        largest = sum([s.request.most_tokens for s in everyone])
        if self._has_windows:
            largest += sum([self._of_window(s, s.request.most_tokens) for s in everyone])
        if largest + 2 * self._slack * len(everyone) <= capacity:
            return True  # even at their largest
        generated, most = len(sequence.output), sequence.request.max_tokens
        length = self._lengths.quantile(sequence.tenant, most, ENDED_LENGTH_QUANTILE, generated)
        return self.peak(everyone, length - generated) - num_held * self._block_size <= capacity

    def _of_window(self, sequence: Sequence, length: float) -> int:
        """Return the most tokens of KV memory, in whole blocks, that layers with a window hold of a text until it has
        `length` tokens: of a prompt those of steps in flight as well.
        """
        decodes = sequence.num_computed_tokens >= sequence.num_prompt_tokens
        window = self._config.need_of(sequence.request.model)
        places = window.decoding if decodes else window.most
        return window.groups * min(ceil(length / self._block_size), places) * self._block_size

    def blocks(self, sequences: Iterable[Sequence]) -> int:
        """Return the blocks of KV memory in use at the future peak."""
        return ceil(self.peak(sequences, deviations=LEASE_CAUTION_DEVIATIONS) / self._block_size)

    def peak(self, sequences: Iterable[Sequence], steps: float = inf, deviations: float | None = None) -> float:
        """Return the tokens of KV memory in use at the future peak within `steps` steps."""
        above = self._deviations if deviations is None else deviations
        demands, shared = [], 0
        for sequence in sequences:
            generated, table = len(sequence.output), sequence.block_table
            mean, deviation = self._lengths.forecast(sequence.tenant, sequence.request.max_tokens, generated)
            holds = sequence.num_tokens + self._slack
            if table.num_shared:
                holds -= table.num_shared * self._block_size
                shared += table.num_shared - table.num_unpaid
            if self._has_windows:  # as at its end
                holds += self._of_window(sequence, sequence.num_tokens + max(0.0, mean - generated))
            demands.append((mean - generated, holds, deviation * deviation))
        demands.sort(reverse=True)
        peak, held, variance = 0.0, float(shared * self._block_size), 0.0
        for count, (left, holds, square) in enumerate(demands, 1):
            held += holds
            variance += square
            peak = max(peak, held + min(left, steps) * count + above * variance**0.5)
        return peak

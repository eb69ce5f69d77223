"""The tokens that a simulated device samples."""

from backend.scheduler.batch import Batch
from backend.scheduler.sequence import Sequence

TOKEN, END = 0, 1  # any other token, and the end token
STEPS_IN_FLIGHT = 2  # steps in flight: tokens of a sequence not yet known


class SampledTokens:
    """Samples the end token of an answer shorter than it declared; its seed is the answer's length.

    A step samples at most one token of a sequence. So each sequence is checked only from the step at which it may end,
    and most steps check none of their rows.
    """

    def __init__(self) -> None:
        self._holders: dict[int, tuple[Sequence, int]] = {}  # by slot: its sequence, and its final number of tokens
        self._due: dict[int, set[int]] = {}  # slots to check, by step

    def admitted(self, sequence: Sequence, step: int) -> None:
        """Record a sequence in its slot, computed from this step on."""
        if not sequence.request.end_tokens:
            self._holders.pop(sequence.slot, None)
            return
        length = sequence.num_prompt_tokens + sequence.request.seed
        self._holders[sequence.slot] = sequence, length
        left = length - sequence.num_prompt_tokens - len(sequence.output) - 1
        self._look_again(sequence.slot, step + max(0, left - STEPS_IN_FLIGHT))

    def of_step(self, batch: Batch) -> list[int]:
        """A token for each sampled row of the step. Steps come in order."""
        tokens = [TOKEN] * len(batch.sampled)
        due = self._due.pop(batch.step, None)
        if due:
            sampled = batch.sampled_slots
            for slot in due:
                self._look(slot, batch, sampled, tokens)
        return tokens

    def _look(self, slot: int, batch: Batch, sampled: list[int], tokens: list[int]) -> None:
        sequence, length = self._holders.get(slot, (None, 0))
        if sequence is None or sequence.slot != slot:
            return
        if slot not in sampled:  # it pauses, or its prompt is not complete
            self._look_again(slot, batch.step + 1)
            return
        index = sampled.index(slot)
        row = batch.sampled[index]
        left = length - (batch.starts[row] + batch.lengths[row] + 1)
        if left == 0:
            tokens[index] = END
        elif left > 0:
            self._look_again(slot, batch.step + left)

    def _look_again(self, slot: int, step: int) -> None:
        self._due.setdefault(step, set()).add(slot)

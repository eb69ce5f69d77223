"""What steps tell the device of sequences: who takes a slot, and which blocks are its own."""

from collections.abc import Iterable

from backend.batch import Admitted
from backend.flight import Flight
from backend.sequence import Sequence


def introduce(sequence: Sequence) -> Admitted:
    """A sequence that has just taken its slot, or has sampled nothing since."""
    tokens = [*sequence.prompt, *sequence.output]
    return Admitted(sequence.slot, sequence.sampling, sequence.seed, tokens, len(sequence.prompt))


class Retelling:
    """Sequences of which the device may not know all that was planned, because steps that said so were lost."""

    def __init__(self) -> None:
        self._untold: list[Sequence] = []

    def begin(self, running: Iterable[Sequence]) -> None:
        self._untold = list(running)

    def add_to(self, flight: Flight) -> None:
        """Tell, ahead of what the step itself has to tell: of those that still hold a slot, be it for this step alone,
        all blocks, and who they are if they have sampled nothing yet.
        """
        if not self._untold:
            return
        kept = [s for s in self._untold if s.slot >= 0 and s not in flight.admitted]
        prefilling = [s for s in kept if len(s.prompt) + len(s.output) == s.num_admitted_tokens]
        flight.batch.admitted[:0] = [introduce(s) for s in prefilling]
        flight.batch.new_blocks[:0] = [(s.slot, 0, list(s.block_table)) for s in kept]
        self._untold = []

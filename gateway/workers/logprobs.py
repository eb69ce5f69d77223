"""Log probabilities on their way to an HTTP worker: numbers in one binary part, and entries that assign them."""

from array import array
from itertools import chain
from typing import Any

from backend.scheduler.batch import TokenLogprobs
from backend.scheduler.sequence import Sequence

Entry = list[Any]  # number of the stream, is_prompt, number of tokens, of likely ones for each


class LogprobsMessage:
    """Gathers a step's log probabilities for all streams of a worker that request them."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._logprobs = array("d")
        self._ids = array("I")

    def add(self, number: int, tokens: list[TokenLogprobs], is_prompt: bool = False) -> None:
        """Add the log probabilities of one stream; each token has the same number of likely tokens."""
        if not tokens:
            return
        self.entries.append([number, is_prompt, len(tokens), len(tokens[0].token_ids)])
        self._logprobs.fromlist([token.logprob for token in tokens])
        self._logprobs.fromlist(list(chain.from_iterable([token.logprobs for token in tokens])))
        self._ids.fromlist([token.rank for token in tokens])
        self._ids.fromlist(list(chain.from_iterable([token.token_ids for token in tokens])))

    def binary(self) -> bytes:
        return self._logprobs.tobytes() + self._ids.tobytes()


def take_logprobs(entries: list[Entry], binary: memoryview, sequences: dict[int, Sequence]) -> None:
    """Append the log probabilities of a `LogprobsMessage` to its sequences, by number, if still known."""
    count = len(binary) // 12
    logprobs, ids = array("d", bytes(binary[: 8 * count])), array("I", bytes(binary[8 * count :]))
    start = 0
    for number, is_prompt, num_tokens, top in entries:
        likely, end = start + num_tokens, start + num_tokens * (1 + top)
        sequence = sequences.get(number)
        mine = None if sequence is None else sequence.prompt_logprobs if is_prompt else sequence.logprobs
        if mine is not None:
            for index in range(num_tokens):
                first = likely + index * top
                last = first + top
                of_token = logprobs[start + index], ids[start + index]
                mine.append(TokenLogprobs(*of_token, ids[first:last].tolist(), logprobs[first:last].tolist()))
        start = end

"""Batches that waste little: Magnus (Cheng et al., "Enabling Efficient Batch Serving for LMaaS", arXiv 2406.04785).

A request joins the batch in which it wastes the least memory reads, if that is less than `MAX_WASTED_TOKENS` and the
batch still fits the KV memory by its predicted lengths; else it begins a batch of its own. A row of a padded batch
is read, in every step in which it has a token to gain, with the padding of its prompt, and then as a whole until the
batch's last answer has ended:

    wasted(s) = output(s) * (P - prompt(s)) + sum over output(s) < g <= G of (P + g)

with P and G the longest prompt and the longest predicted output of the batch; a batch wastes what the worst of its rows
does. Batches are served by the highest response ratio of their oldest request, one in a plan and whole. It is meant for
`--batching static_padded`, whose batches it makes; elsewhere it admits a batch at a time.

Blind to tenants, classes and weights. The paper predicts lengths by
a random forest over embeddings and service times by nearest neighbours; here the predictors are the project's own.
"""

from collections.abc import Mapping
from functools import partial

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line
from labs.orderings.sequence_heap import Predict

MAX_WASTED_TOKENS = 50_000  # of padding read by one row: the authors' choice


class _Batch:
    """Requests to be computed together, in order of arrival, with their predicted outputs and seconds."""

    def __init__(self, members: Mapping[Sequence, tuple[float, float]] | None = None) -> None:
        self.members = dict(members or {})

    def wasted(self, sequence: Sequence, output: float) -> float:
        """The batch's waste with one more request."""
        rows = [(one.num_prompt_tokens, tokens) for one, (tokens, _) in self.members.items()]
        rows.append((sequence.num_prompt_tokens, output))
        prompt, longest = max(row[0] for row in rows), max(row[1] for row in rows)
        return max(_wasted(*row, prompt, longest) for row in rows)

    def tokens(self, sequence: Sequence, output: float) -> float:
        """The batch's memory with one more request, all rows as long as the longest."""
        prompt = max(sequence.num_prompt_tokens, *(one.num_prompt_tokens for one in self.members))
        return (len(self.members) + 1) * (prompt + max(output, *(tokens for tokens, _ in self.members.values())))


class Magnus(Indifferent):
    """Serves batches made as requests came. O(waiting) for an arrival, O(batches) for a plan."""

    def __init__(self, output: Predict, seconds: Predict, kv_tokens: int, most: int) -> None:
        """`output` predicts the tokens of an answer, `seconds` a request's engine time, above 0. Batches have at most
        `most` requests.
        """
        self._output, self._seconds, self._kv_tokens, self._most = output, seconds, kv_tokens, most
        self._outputs: dict[Sequence, tuple[float, float]] = {}  # with the seconds, of live sequences
        self._batches: list[_Batch] = []  # none of them empty
        self._batch_of: dict[Sequence, _Batch] = {}
        self._served: _Batch | None = None  # by the present plan
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._batch_of)

    def set_time(self, now: float) -> None:
        self._now, self._served = now, None

    def add(self, sequence: Sequence) -> None:
        self._outputs[sequence] = self._output(sequence), self._seconds(sequence)
        self.restore(sequence)
        self._now = max(self._now, sequence.arrival)

    def restore(self, sequence: Sequence) -> None:
        batch = self._batch_for(sequence, self._outputs[sequence][0])
        if batch is None:
            self._batches.append(batch := _Batch())
        batch.members[sequence] = self._outputs[sequence]
        self._batch_of[sequence] = batch

    def head(self) -> Sequence | None:
        """Return the first of the batch that this plan serves; None when all of it is served."""
        batch = self._served or min(self._batches, key=partial(_key, self._now), default=None)
        return None if batch is None else next(iter(batch.members), None)

    def remove(self, sequence: Sequence) -> None:
        if sequence is self.head():
            self._served = self._batch_of[sequence]
        batch = self._batch_of.pop(sequence)
        del batch.members[sequence]
        if not batch.members:
            self._batches.remove(batch)

    def around(self, newcomer: Sequence) -> Line:
        """By the present ratios; the newcomer stands at the end of its batch."""
        expected = self._output(newcomer), self._seconds(newcomer)
        own = self._batch_for(newcomer, expected[0])
        joined = _Batch() if own is None else _Batch(own.members)
        joined.members[newcomer] = expected
        batches = [*(joined if batch is own else batch for batch in self._batches), *([joined] if own is None else [])]
        in_turn = sorted(batches, key=partial(_key, max(self._now, newcomer.arrival)))
        return Line.split([one for batch in in_turn for one in batch.members], newcomer)

    def ended(self, sequence: Sequence) -> None:
        self._outputs.pop(sequence, None)

    def _batch_for(self, sequence: Sequence, output: float) -> _Batch | None:
        """The batch that takes it; None: it begins one."""
        best, least = None, float(MAX_WASTED_TOKENS)
        for batch in self._batches:
            if len(batch.members) < self._most and batch.tokens(sequence, output) <= self._kv_tokens:
                wasted = batch.wasted(sequence, output)
                if wasted < least:
                    best, least = batch, wasted
        return best


def _key(now: float, batch: _Batch) -> tuple[float, float]:
    """Return the batch's response ratio, the highest first; it takes as long as its longest."""
    seconds = max(seconds for _, seconds in batch.members.values())
    oldest = min(one.arrival for one in batch.members)
    return (oldest - now) / seconds, oldest


def _wasted(prompt: int, output: float, longest_prompt: int, longest_output: float) -> float:
    idle = longest_output - output
    return output * (longest_prompt - prompt) + idle * (longest_prompt + (output + 1 + longest_output) / 2)

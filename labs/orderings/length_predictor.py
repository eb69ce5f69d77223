"""Ranks answers by their expected lengths, from hashed features of their prompts, and learns from every answer.

A linear ranker: the score of a request is the sum of the weights of its features. An answer is compared with some of
the answers before it, and if the longer of a pair does not score higher by a margin, the weights of both are moved (a
pairwise hinge loss, as in Joachims, 2002; ranks are easier to learn than lengths: Fu et al., 2024). The expected length
of a score is the mean of answers of about the same rank. Pure: it depends on the answers and their order alone, and
hashes are arithmetic, the same in every process.

A client's declared most tokens are a feature of its tenant alone, so that declaring little gains nothing from one
answer to the next, and judges no other tenant.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

NUM_WEIGHTS = 1024
MIN_ANSWERS = 200  # before the first prediction
EDGE_TOKENS = 4  # at either end of a prompt, used as features
_RECENT_ANSWERS = 128  # compared with new answers
_PAIRS = 8  # comparisons for each new answer
_MARGIN = 50  # steps by which the longer has to score higher; a weight moves by one
_UNLIKE_RATIO = 1.2  # of two lengths: closer pairs are skipped
_RANKED_SCORES = 512  # recent scores
_BUCKETS = 16
_BUCKET_ANSWERS = 64
_LENGTH, _OF_TENANT, _DECLARED, _HEAD, _TAIL, _HEAD_PAIR, _TAIL_PAIR = range(7)


def _hashed(kind: int, value: int, more: int = 0) -> int:
    """Return one of `NUM_WEIGHTS` numbers, by multiplication (Knuth, 6.4)."""
    mixed = (value * 2654435761 + more * 40503 + kind * 97) & 0xFFFFFFFF
    return (mixed * 2246822519 & 0xFFFFFFFF) >> 22


@lru_cache(1024)
def _number_of(tenant: str) -> int:
    return crc32(tenant.encode())


def features_of(tenant: str, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The hashed features of a request: its tenant, its prompt's length and edges, and its declaration."""
    length, who = len(prompt).bit_length() * 2 + (len(prompt) * 3 >> len(prompt).bit_length() & 1), _number_of(tenant)
    found = [
        _hashed(_LENGTH, length),
        _hashed(_OF_TENANT, who, length),
        _hashed(_DECLARED, who, max_tokens.bit_length()),
    ]
    for token, pair, edge in ((_HEAD, _HEAD_PAIR, prompt[:EDGE_TOKENS]), (_TAIL, _TAIL_PAIR, prompt[-EDGE_TOKENS:])):
        found += [_hashed(token, one) for one in edge]
        found += [_hashed(pair, edge[at], edge[at + 1]) for at in range(0, len(edge) - 1, 2)]
    return tuple(sorted(set(found)))


class LengthPredictor:
    """Predicts from features; asking and learning are O(features) and take some microseconds."""

    def __init__(self) -> None:
        self.count = 0  # answers learned from
        self._weights = [0] * NUM_WEIGHTS  # in steps, so that sums are exact
        self._recent: deque[tuple[tuple[int, ...], int]] = deque(maxlen=_RECENT_ANSWERS)
        self._scores: deque[int] = deque()  # recent ones, before learning from their answers
        self._sorted: list[int] = []  # the same
        self._buckets = [deque[int](maxlen=_BUCKET_ANSWERS) for _ in range(_BUCKETS)]  # lengths by rank

    def expected(self, features: tuple[int, ...]) -> float | None:
        """Return the expected length of the answer, in tokens; None until there were `MIN_ANSWERS`."""
        if self.count < MIN_ANSWERS:
            return None
        rank = self._rank(self._score(features))
        near = sorted(range(_BUCKETS), key=lambda other: abs(other - rank))
        bucket = next(self._buckets[one] for one in near if self._buckets[one])
        return sum(bucket) / len(bucket)

    def observe(self, features: tuple[int, ...], length: int) -> None:
        """Learn from an answer that is complete."""
        score = self._score(features)
        if len(self._scores) == _RANKED_SCORES:
            del self._sorted[bisect_left(self._sorted, self._scores.popleft())]
        self._scores.append(score)
        insort(self._sorted, score)
        self._buckets[self._rank(score)].append(length)
        self._learn(features, length)
        self._recent.append((features, length))
        self.count += 1

    def _score(self, features: tuple[int, ...]) -> int:
        return sum([self._weights[feature] for feature in features])

    def _rank(self, score: int) -> int:
        return bisect_left(self._sorted, score) * _BUCKETS // (len(self._sorted) + 1)

    def _learn(self, features: tuple[int, ...], length: int) -> None:
        """Compare with answers spread over the recent ones, different ones for each answer."""
        recent, weights = self._recent, self._weights
        for turn in range(min(_PAIRS, len(recent))):
            other, other_length = recent[(self.count * 7 + turn * 17) % len(recent)]
            if max(length, other_length) < _UNLIKE_RATIO * min(length, other_length):
                continue
            longer, shorter = (features, other) if length > other_length else (other, features)
            if self._score(longer) - self._score(shorter) >= _MARGIN:
                continue
            for feature in longer:
                weights[feature] += 1
            for feature in shorter:
                weights[feature] -= 1

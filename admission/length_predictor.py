"""Ranks answers by how long they will be, from hashed features of their prompts, and learns from every answer.

A linear ranker: the score of a request is the sum of the weights of its features. An answer is compared with some of
those before it, and where the longer of a pair does not score higher by a margin, the weights of both are moved (a
pairwise hinge loss, as in Joachims, 2002; ranks are easier to learn than lengths: Fu et al., 2024). What is expected of
a score is what answers of about the same rank had. Pure: nothing depends on more than the answers and their order, and
hashes are arithmetic, the same in every process. No prompt can be read from features: of `NUM_WEIGHTS` values, many
tokens share each.

What a client declares as its most tokens is a feature of its tenant's alone, and so are its key and the form of its
conversation: they count for as much as the tenant's answers say, so that declaring little gains nothing from one answer
to the next, and nobody else is judged by it.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

NUM_WEIGHTS = 1024
ENOUGH = 200  # answers, before it says anything
EDGE = 4  # tokens at either end of a prompt that are looked at
MOST_TRAITS = 16
_LEARNT_FROM = 128  # recent answers that new ones are compared with
_PAIRS = 8  # of them, for each new one
_MARGIN = 50  # steps by which the longer is to score higher; a weight moves by one
_UNLIKE = 1.2  # times as long: pairs that differ by less teach nothing
_RANKED = 512  # recent scores
_JUDGED_WITH = 16  # answers before it, which each is compared with for `tau`
_LARGEST = 2**40  # of what is saved
_HASHING = 2  # rises whenever `features_of` changes: weights of before are of other features
_BUCKETS = 16
_PER_BUCKET = 64  # answers
_TENANTS = 1024  # whose numbers are remembered
_LENGTH, _OF_TENANT, _DECLARED, _HEAD, _TAIL, _HEAD_PAIR, _TAIL_PAIR, _TRAIT = range(8)


def _hashed(kind: int, value: int, more: int = 0) -> int:
    """Returns one of `NUM_WEIGHTS` numbers, by multiplication (Knuth, 6.4)."""
    mixed = (_times(value, 2654435761) + more * 40503 + kind * 97) & 0xFFFFFFFF
    return _times(mixed, 2246822519) >> 22


def _times(value: int, factor: int) -> int:
    """Returns the low 32 bits of the product of two numbers of 32, by products that fit a compiled integer."""
    return ((value & 0xFFFF) * factor + (((value >> 16) * factor & 0xFFFF) << 16)) & 0xFFFFFFFF


@lru_cache(_TENANTS)
def _number_of(tenant: str) -> int:
    return crc32(tenant.encode())


def features_of(tenant: str, prompt: Sequence[int], max_tokens: int, traits: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the hashed features of a request: its tenant, its prompt's length and edges, what it declares, and up to
    `MOST_TRAITS` others that whoever made it knows, such as its key.
    """
    length, who = len(prompt).bit_length() * 2 + (len(prompt) * 3 >> len(prompt).bit_length() & 1), _number_of(tenant)
    found = [
        _hashed(_LENGTH, length),
        _hashed(_OF_TENANT, who, length),
        _hashed(_DECLARED, who, max_tokens.bit_length()),
    ]
    for token, tail, pairs in ((_HEAD, _HEAD_PAIR, prompt[:EDGE]), (_TAIL, _TAIL_PAIR, prompt[-EDGE:])):
        found += [_hashed(token, one) for one in pairs]
        found += [_hashed(tail, pairs[at], pairs[at + 1]) for at in range(0, len(pairs) - 1, 2)]
    found += [_hashed(_TRAIT, who, trait) for trait in traits[:MOST_TRAITS]]
    return tuple(sorted(set(found)))


class _Bucket:
    """The lengths of recent answers of about one rank."""

    def __init__(self) -> None:
        self.lengths: deque[int] = deque()
        self.sum = 0

    def add(self, length: int) -> None:
        if len(self.lengths) == _PER_BUCKET:
            self.sum -= self.lengths.popleft()
        self.lengths.append(length)
        self.sum += length


class Learned(NamedTuple):
    """All that a later start needs to go on: some kilobytes of whole numbers, with which nothing of it is lost."""

    num_answers: int  # that it was learned from
    weights: list[int]  # `NUM_WEIGHTS`
    answers: list[tuple[int, int]]  # scores and lengths of recent ones, the oldest first

    def to_json(self) -> dict[str, Any]:
        return {"hashing": _HASHING, **self._asdict()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Learned":
        """Returns what `to_json` gave. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
        if saved["hashing"] != _HASHING:
            raise ValueError(f"features are hashed otherwise than in {saved['hashing']}: {_HASHING}")
        return cls.of(saved["num_answers"], saved["weights"], saved["answers"])

    @classmethod
    def of(cls, num_answers: int, weights: Sequence[int], answers: Sequence[Sequence[int]]) -> "Learned":
        """Returns it checked. Raises `ValueError` or `TypeError`."""
        learned = cls(num_answers, list(weights), [(score, length) for score, length in answers])
        numbers = [num_answers, *learned.weights, *(number for answer in learned.answers for number in answer)]
        if not all(type(number) is int and abs(number) <= _LARGEST for number in numbers):
            raise ValueError(f"all are whole numbers of at most {_LARGEST}")
        if len(learned.weights) != NUM_WEIGHTS or len(learned.answers) > _RANKED or num_answers < len(learned.answers):
            raise ValueError(f"{NUM_WEIGHTS} weights, and at most {_RANKED} of the answers that were learned from")
        if any(length < 0 for _, length in learned.answers):
            raise ValueError("an answer has no length below 0")
        return learned


class LengthPredictor:
    """Predicts from features; asking and learning are O(features) and take some microseconds."""

    def __init__(self) -> None:
        self.count = 0  # answers that it has learned from
        self._weights = [0] * NUM_WEIGHTS  # in steps, so that sums are exact
        self._recent: deque[tuple[tuple[int, ...], int]] = deque(maxlen=_LEARNT_FROM)
        self._scored: deque[tuple[int, int]] = deque(maxlen=_RANKED)  # scores before learning, and lengths
        self._sorted: list[int] = []  # those scores
        self._buckets = [_Bucket() for _ in range(_BUCKETS)]
        self._pairs: deque[tuple[int, int]] = deque()  # by answer of `_scored`: pairs in order, and against it
        self._in_order = self._against = 0

    @property
    def learned(self) -> Learned:
        """What it has learned until now."""
        return Learned(self.count, list(self._weights), list(self._scored))

    def go_on_from(self, learned: Learned) -> None:
        """Begin where an earlier one ended, before anything was observed."""
        assert not self.count, "it has learned already"
        self.count, self._weights = learned.num_answers, list(learned.weights)
        for score, length in learned.answers:
            self._judge(score, length)
        self._sorted = sorted(score for score, _ in learned.answers)
        for score, length in learned.answers:
            self._buckets[self._rank(score)].add(length)

    def expected(self, features: tuple[int, ...]) -> float | None:
        """Returns the expected length of the answer, in tokens; None until there were `ENOUGH` answers."""
        bucket = self._bucket_of(features)
        return None if bucket is None else bucket.sum / len(bucket.lengths)

    def quantile(self, features: tuple[int, ...], share: float) -> int | None:
        """Returns the length that `share` of answers of about this rank did not exceed; None as above."""
        bucket = self._bucket_of(features)
        if bucket is None:
            return None
        ordered = sorted(bucket.lengths)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def observe(self, features: tuple[int, ...], length: int) -> None:
        """Learn from an answer that is complete."""
        score = self._score(features)
        if len(self._scored) == _RANKED:
            del self._sorted[bisect_left(self._sorted, self._scored[0][0])]
        self._judge(score, length)
        insort(self._sorted, score)
        self._buckets[self._rank(score)].add(length)
        self._learn(features, length)
        self._recent.append((features, length))
        self.count += 1

    @property
    def tau(self) -> float | None:
        """Kendall's tau of scores, as they were before the answer, against lengths: of pairs of the last `_RANKED`
        answers, each with the `_JUDGED_WITH` before it. Pairs that tie in either do not count. None: there are none.
        """
        pairs = self._in_order + self._against
        return (self._in_order - self._against) / pairs if pairs else None

    def _judge(self, score: int, length: int) -> None:
        """Count the pairs of a newcomer in order and against it, and forget those of the oldest."""
        if len(self._scored) == _RANKED:
            in_order, against = self._pairs.popleft()
            self._in_order, self._against = self._in_order - in_order, self._against - against
        in_order = against = 0
        for other, other_length in islice(reversed(self._scored), _JUDGED_WITH):
            sign = (score - other) * (length - other_length)
            in_order, against = in_order + (sign > 0), against + (sign < 0)
        self._scored.append((score, length))
        self._pairs.append((in_order, against))
        self._in_order, self._against = self._in_order + in_order, self._against + against

    def _score(self, features: tuple[int, ...]) -> int:
        weights, score = self._weights, 0
        for feature in features:
            score += weights[feature]
        return score

    def _rank(self, score: int) -> int:
        return bisect_left(self._sorted, score) * _BUCKETS // (len(self._sorted) + 1)

    def _bucket_of(self, features: tuple[int, ...]) -> _Bucket | None:
        if self.count < ENOUGH:
            return None
        rank = self._rank(self._score(features))
        near = sorted(range(_BUCKETS), key=lambda other: abs(other - rank))
        return next(self._buckets[one] for one in near if self._buckets[one].lengths)

    def _learn(self, features: tuple[int, ...], length: int) -> None:
        """Compare with answers spread over the recent ones, which are others from one answer to the next."""
        recent, weights = self._recent, self._weights
        if not recent:
            return
        for turn in range(min(_PAIRS, len(recent))):
            other, other_length = recent[(self.count * 7 + turn * 17) % len(recent)]
            if max(length, other_length) < _UNLIKE * min(length, other_length):
                continue
            longer, shorter = (features, other) if length > other_length else (other, features)
            if self._score(longer) - self._score(shorter) >= _MARGIN:
                continue
            for feature in longer:
                weights[feature] += 1
            for feature in shorter:
                weights[feature] -= 1

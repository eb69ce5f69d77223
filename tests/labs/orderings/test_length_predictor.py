from math import exp
from random import Random

import pytest

from labs.orderings.length_predictor import LengthPredictor, features_of

KINDS = 8


def request(random: Random, kind: int, tenant: str = "acme", most: int = 1024) -> tuple[tuple[int, ...], int]:
    """Returns features and the length of an answer, which the kind of the prompt has to do with."""
    prompt = [70 + kind, *(random.randrange(30_000) for _ in range(random.randint(5, 200)))]
    return features_of(tenant, prompt, most), round(exp(3.0 + 0.4 * kind + random.gauss(0.0, 0.5)))


def taught(answers: int, seed: int = 1) -> LengthPredictor:
    random, predictor = Random(seed), LengthPredictor()
    for _ in range(answers):
        predictor.observe(*request(random, random.randrange(KINDS)))
    return predictor


def test_it_learns_which_prompts_have_long_answers() -> None:
    predictor, random = taught(2000), Random(3)
    short, long = ([predictor.expected(request(random, kind)[0]) or 0.0 for _ in range(20)] for kind in (0, KINDS - 1))
    assert sum(long) > 5 * sum(short)
    sampled = [request(random, random.randrange(KINDS)) for _ in range(1000)]
    expected = [predictor.expected(features) or 0.0 for features, _ in sampled]
    pairs = zip(expected, expected[1:], sampled, sampled[1:], strict=False)
    signs = [(one - other) * (length - longer) for one, other, (_, length), (_, longer) in pairs]
    in_order, against = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    assert in_order - against > 0.5 * (in_order + against), "Kendall's tau"


@pytest.mark.parametrize("seed", range(3))
def test_a_declaration_counts_only_by_its_tenants_own_answers(seed: int) -> None:
    """One half of a tenant's requests declare little and the other much; the answers are alike."""
    random, predictor = Random(seed), LengthPredictor()
    for _ in range(3000):
        kind, honest = random.randrange(KINDS), random.random() < 0.5
        predictor.observe(*request(random, kind, "acme" if honest else "liar", random.choice((1000, 5000))))
    expected = {
        (tenant, most): sum(
            predictor.expected(request(random, n % KINDS, tenant, most)[0]) or 0.0 for n in range(40 * KINDS)
        )
        for tenant in ("acme", "liar")
        for most in (1000, 5000)
    }
    for tenant in ("acme", "liar"):
        little, much = expected[tenant, 1000], expected[tenant, 5000]
        assert max(little, much) < 1.25 * min(little, much)

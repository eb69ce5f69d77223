import json
from math import exp
from random import Random

import pytest

from admission.length_predictor import ENOUGH, MOST_TRAITS, NUM_WEIGHTS, Learned, LengthPredictor, features_of

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


def test_it_says_nothing_until_it_has_seen_enough_answers() -> None:
    features, _ = request(Random(2), 0)
    assert taught(ENOUGH - 1).expected(features) is None
    assert taught(ENOUGH - 1).quantile(features, 0.5) is None
    assert taught(ENOUGH).expected(features) is not None
    assert LengthPredictor().tau is None


def test_it_learns_which_prompts_have_long_answers() -> None:
    predictor, random = taught(2000), Random(3)
    tau = predictor.tau
    assert tau is not None and tau > 0.5
    short, long = ([predictor.expected(request(random, kind)[0]) or 0.0 for _ in range(20)] for kind in (0, KINDS - 1))
    assert sum(long) > 5 * sum(short)
    features = request(random, 4)[0]
    low, middle, high = (predictor.quantile(features, share) or 0 for share in (0.1, 0.5, 0.9))
    assert low < middle < high


@pytest.mark.parametrize("seed", range(3))
def test_what_a_tenant_declares_counts_for_what_its_answers_say(seed: int) -> None:
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


def of_trait(trait: int, prompt: int, tenant: str = "acme") -> tuple[int, ...]:
    """Features behind a chat template: prompts are of one length, and begin and end alike."""
    return features_of(tenant, [1, 2, 3, 4, *[prompt] * 20, 5, 6, 7, 8], 100, (trait,))


def test_what_else_is_known_of_a_request_tells_its_tenants_answers_apart_and_nobody_elses() -> None:
    predictor, random = LengthPredictor(), Random(6)
    for n in range(1200):
        trait = n % 2
        predictor.observe(of_trait(trait, random.randrange(9)), round((20 + 200 * trait) * random.uniform(0.8, 1.2)))
    short, long = (predictor.expected(of_trait(trait, 3)) for trait in (0, 1))
    assert short and long and long > 5 * short
    assert predictor.expected(of_trait(0, 3, "other")) == predictor.expected(of_trait(1, 3, "other"))


def test_traits_are_bounded() -> None:
    assert features_of("a", [1], 1, range(MOST_TRAITS)) == features_of("a", [1], 1, range(MOST_TRAITS + 1000))


def test_features_are_the_same_in_every_process_and_name_no_token() -> None:
    features = features_of("acme", [1, 2, 3, 4, 5, 6, 7, 8, 9], 100)
    assert features == (39, 176, 191, 206, 221, 249, 308, 397, 480, 863, 878, 890, 892, 893, 908)
    assert features_of("acme", [], 1) == features_of("acme", [], 1) != ()


def test_it_decides_alike_from_the_same_answers() -> None:
    features = request(Random(4), 3)[0]
    assert taught(700).expected(features) == taught(700).expected(features)


def test_one_that_goes_on_ranks_and_learns_as_the_one_before() -> None:
    before, after, random = taught(3000), LengthPredictor(), Random(7)
    after.go_on_from(Learned.from_json(json.loads(json.dumps(before.learned.to_json()))))
    assert (after.count, after.learned) == (before.count, before.learned)
    assert after.tau == pytest.approx(before.tau, abs=0.01)  # of the first of its answers, fewer pairs are known
    for _ in range(300):
        features, length = request(random, random.randrange(KINDS))
        expected, as_before = after.expected(features), before.expected(features)
        assert expected and as_before and 0.4 < expected / as_before < 2.5
        before.observe(features, length)
        after.observe(features, length)
    assert before.tau and after.tau and abs(before.tau - after.tau) < 0.05


def test_two_that_go_on_from_the_same_stay_alike() -> None:
    learned, random = taught(700).learned, Random(8)
    one, other = LengthPredictor(), LengthPredictor()
    one.go_on_from(learned)
    other.go_on_from(Learned.from_json(one.learned.to_json()))
    for _ in range(400):
        features, length = request(random, random.randrange(KINDS))
        assert one.expected(features) == other.expected(features)
        one.observe(features, length)
        other.observe(features, length)
    assert one.learned == other.learned and learned == taught(700).learned


def test_what_is_saved_is_bounded_however_many_answers_there_were() -> None:
    assert len(json.dumps(taught(6000).learned.to_json())) < 16_000


@pytest.mark.parametrize(
    "change",
    [
        {"hashing": 0},
        {"num_answers": 3},
        {"num_answers": "many"},
        {"weights": [0] * (NUM_WEIGHTS - 1)},
        {"weights": [0.5] * NUM_WEIGHTS},
        {"weights": [10**300] * NUM_WEIGHTS},
        {"answers": [[1, -1]] * 5},
        {"answers": [[1, 2, 3]] * 5},
        {"answers": [[1, 1]] * 600},
        {"answers": None},
    ],
)
def test_what_was_not_saved_so_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Learned.from_json(taught(ENOUGH).learned.to_json() | change)


def test_tau_is_of_recent_answers_alone() -> None:
    """All in order at first, all against it later."""
    predictor, random = taught(2000), Random(5)
    high = predictor.tau
    for n in range(600):
        kind = random.randrange(KINDS)
        features, _ = request(random, kind)
        predictor.observe(features, round(exp(6.0 - 0.4 * kind)))
        if n == 100:
            assert high and predictor.tau and predictor.tau < high
    assert predictor.tau is not None and -1.0 <= predictor.tau < 0.9

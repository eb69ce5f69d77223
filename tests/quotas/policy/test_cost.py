"""Budgets in money: how a policy writes them, what tokens cost, and what does not fit together."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tenants.usage import cost as cost_of
from quotas.policy.limit import MAX_AMOUNT, NANOS, Budget, BudgetPeriod, Limit, Rate, Resource, TokenPrices
from quotas.policy.policy import Policy, Price, token_prices
from quotas.policy.policy_file import PolicyError, parse_policy
from quotas.policy.policy_text import policy_text
from quotas.policy.units import budget_of_money, show_money
from quotas.reservation import Ask, Usage

PRICED = "price: {input: 0.15/1M, cached_input: 0.075/1M, output: 0.6/1M, reasoning: 0.9/1M, currency: EUR}"
PRICES = TokenPrices(150, 75, 600, 900, "EUR")


def of_model(prices: str) -> str:
    return PRICED.replace("EUR", f"EUR, models: {{m: {{{prices}}}}}")


def read(text: str) -> Policy:
    return parse_policy({"policy.yaml": text.encode()})


def test_tokens_are_counted_at_their_tenants_prices() -> None:
    policy = read(
        f"tenants:\n  acme:\n    {PRICED}\n    limits: {{cost: [5/day, 100/month]}}\n"
        "    keys: {k1: {limits: {cost: 12.50/month}}}\n"
    )
    acme = policy.tenants["acme"]
    day, month = (Budget(period) for period in (BudgetPeriod.DAY, BudgetPeriod.MONTH))
    assert acme.limits == (
        Limit(Resource.COST, 5 * NANOS, day, None, PRICES),
        Limit(Resource.COST, 100 * NANOS, month, None, PRICES),
    )
    (limit,) = acme.keys["k1"].limits
    assert (limit.name, limit.amount, limit.prices) == ("key:k1:cost/month", 12_500_000_000, PRICES)
    assert Ask(1, 1000, 100).of(limit) == 1000 * 150 + 100 * 900, "the most, of which the rest is given back"
    assert Usage(1000, 100, 400, reasoning_tokens=30).of(limit) == 600 * 150 + 400 * 75 + 70 * 600 + 30 * 900
    assert limit.most_output(1000) == (12_500_000_000 - 1000 * 150) // 900
    assert read(policy_text(policy)) == policy


def test_a_token_in_a_batch_costs_its_share() -> None:
    policy = read(f"tenants: {{acme: {{{PRICED.replace('EUR', 'EUR, batch: 0.04')}, limits: {{cost: 5/day}}}}}}")
    price = policy.tenants["acme"].price
    assert price is not None and price.batch == Decimal("0.04")
    assert token_prices(price) == PRICES and token_prices(price.in_batches) == TokenPrices(6, 3, 24, 36, "EUR")
    assert read(policy_text(policy)) == policy


OF_MODELS = "EUR, batch: 0.04, models: {minilm: {input: 0.25/1M}, big: {output: 9/1M, batch: 0.2}}"


def test_models_have_prices_of_their_own() -> None:
    policy = read(f"tenants: {{acme: {{{PRICED.replace('EUR', OF_MODELS)}, limits: {{cost: 5/day}}}}}}")
    price = policy.tenants["acme"].price
    assert price is not None
    assert [token_prices(price.of(name), name) for name in ("minilm", "big")] == [
        TokenPrices(250, 250, 600, 900, "EUR", "minilm"),
        TokenPrices(150, 75, 9000, 9000, "EUR", "big"),
    ]
    assert (price.of("other"), price.of(None)) == (price, price)
    assert [str(price.of(name).batch) for name in ("minilm", "big")] == ["0.04", "0.2"]
    assert read(policy_text(policy)) == policy
    assert read(policy_text(policy).replace("9/1M", "8/1M")).version != policy.version


def test_an_inherited_budget_counts_at_the_tenants_own_prices() -> None:
    own = "price: {input: 1/1M, output: 2/1M, currency: USD}"
    policy = read(f"defaults:\n  {PRICED}\n  limits: {{cost: 5/day}}\ntenants:\n  acme: {{{own}}}\n  globex: {{}}\n")
    prices = {name: one.limits[0].prices for name, one in policy.tenants.items()}
    assert prices == {"acme": TokenPrices(1000, 1000, 2000, 2000, "USD"), "globex": PRICES}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants: {a: {limits: {cost: 5/day}}}", r"tenants\.a\.limits\.cost: .*needs a price of the tenant"),
        (
            f"defaults: {{{PRICED}, limits: {{cost: 5/day}}}}\ntenants: {{a: {{price: none}}}}",
            r"tenants\.a\.price: .*must fit limits\.cost of defaults, which needs a price",
        ),
        (
            "tenants: {a: {price: {input: 0.00005/1M, output: 1/1M, currency: EUR}, limits: {cost: 5/day}}}",
            "needs prices with three decimals per 1M at most",
        ),
        (
            f"tenants: {{a: {{{PRICED.replace('0.075', '0.16')}, limits: {{cost: 5/day}}}}}}",
            "needs a price of cached_input that is not above that of input",
        ),
        (
            f"tenants: {{a: {{{PRICED.replace('EUR', 'EUR, batch: 0.33')}, limits: {{cost: 5/day}}}}}}",
            r"needs prices with three decimals per 1M at most, also times price\.batch",
        ),
        (f"tenants: {{a: {{{PRICED.replace('EUR', 'EUR, batch: 1.5')}}}}}", r"is no share, such as 0\.5"),
        (
            f"tenants: {{a: {{{of_model('input: 0.00005/1M')}, limits: {{cost: 5/day}}}}}}",
            "needs prices of m with three decimals per 1M at most",
        ),
        (
            f"tenants: {{a: {{{of_model('cached_input: 0.2/1M')}, limits: {{cost: 5/day}}}}}}",
            "needs a price of cached_input of m that is not above that of input",
        ),
        (
            f"tenants: {{a: {{{of_model('reasoning: 0.00005/1M')}, limits: {{cost: 5/day}}}}}}",
            "needs prices of m with three decimals per 1M at most",
        ),
        (f"tenants: {{a: {{{of_model('reasoning: -1/1M')}}}}}", r"price\.models\.m\.reasoning: .*no price|not a price"),
        (f"tenants: {{a: {{{of_model('currency: USD')}}}}}", r"price\.models\.m.*currency"),
        (f"tenants: {{a: {{{PRICED}, limits: {{cost: 5/min}}}}}}", "is not an amount of money such as 100/month"),
        (f"tenants: {{a: {{{PRICED}, limits: {{cost: 0/day}}}}}}", "is not within 0.000000001 and 1000000"),
        (f"tenants: {{a: {{{PRICED}, limits: {{cost: 2M/day}}}}}}", "is not within 0.000000001 and 1000000"),
        (f"tenants: {{a: {{{PRICED}, limits: {{cost: [5/day, 6/day]}}}}}}", "has two limits per day: keep one"),
        ("tenants: {a: {keys: {k: {limits: {cost: 5/day}}}}}", r"keys\.k\.limits\.cost: .*needs a price of the tenant"),
    ],
)
def test_what_does_not_fit_together_is_told_with_its_place(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        read(text)


def test_a_rate_of_money_is_no_limit() -> None:
    with pytest.raises(ValueError, match="cost is limited by the day, week, month or session"):
        Limit(Resource.COST, 1, Rate(60, 1), None, PRICES)


@given(st.integers(1, MAX_AMOUNT))
def test_amounts_are_read_as_they_are_written(amount: int) -> None:
    assert budget_of_money(f"{show_money(amount)}/week") == (amount, Budget(BudgetPeriod.WEEK))


@given(st.tuples(*[st.integers(0, 10**9)] * 4), st.tuples(*[st.integers(0, 10**6)] * 4))
def test_the_cost_of_usage_is_exact_and_none_is_above_what_was_reserved(nanos: Any, tokens: Any) -> None:
    given_price, cached_price, output, reasoning = (Decimal(one) / NANOS for one in nanos)
    price = Price(given_price, output, min(cached_price, given_price), reasoning, "EUR")
    prices, (computed, hits, content, thought) = token_prices(price), tokens
    assert prices is not None
    cost = prices.cost(computed + hits, hits, content + thought, thought)
    billed = computed * price.input + hits * price.cached_input + content * price.output + thought * price.reasoning
    assert (
        Decimal(cost) / NANOS
        == billed
        == cost_of(Usage(computed + hits, content + thought, hits, 0, 1, 0, thought), price)
    )
    assert cost <= prices.most(computed + hits, content + thought)

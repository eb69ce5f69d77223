"""Reads teams from trees of text, and the limits that a tenant has of its team."""

from quotas.policy import words
from quotas.policy.limit import UTC_CALENDAR, Limit, Resource, TokenPrices
from quotas.policy.limit_parser import problem_with, read_calendar, read_limits, refuse_tenants_limits, with_prices
from quotas.policy.policy import Price, TeamPolicy, token_prices
from quotas.policy.schema import fields_of
from quotas.policy.section import Section


def read_teams(section: Section | None) -> dict[str, TeamPolicy]:
    """The teams by name."""
    return {name: _read_team(fields, name) for name, _, fields in section.sections(words.team_name)} if section else {}


def _read_team(section: Section, name: str) -> TeamPolicy:
    section.refuse_unknown(fields_of("team"))
    limits, calendar = section.section("limits"), read_calendar(section, UTC_CALENDAR)
    if limits:
        refuse_tenants_limits(limits)
    found, currency = read_limits(limits, None, (), calendar, name), section.value("currency", words.currency, None)
    has_cost = any(limit.resource is Resource.COST for limit in found)
    if limits and has_cost and "currency" not in section:
        limits.wrong(Resource.COST, "needs a currency of the team, such as EUR, in which its tenants' prices are")
    if currency is None or not has_cost:
        return TeamPolicy(name, found, calendar)
    prices = TokenPrices(0, 0, 0, 0, currency)  # each tenant has its own
    return TeamPolicy(name, with_prices(found, prices), calendar, currency)


def limits_of_team(section: Section, team: TeamPolicy, price: Price | None) -> tuple[Limit, ...]:
    """The limits of the team of a tenant, at the tenant's price."""
    if team.currency is None:
        return team.limits
    problem = problem_with(price)
    if problem is None and price is not None and price.currency != team.currency:
        problem = f"counts {team.currency}, and not {price.currency} of the tenant's price"
    if price is None or problem is not None:
        message = f"is not for this tenant: limits.cost of team {team.name} {problem}"
        section.wrong("team", message) if "team" in section else section.note(section.mark, section.path, message)
        return ()
    return with_prices(team.limits, token_prices(price))

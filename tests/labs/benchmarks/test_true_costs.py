"""Shares by the device's true costs: equal where prices are, and shown where they are not."""

import pytest

from labs.benchmarks.report import Report
from labs.benchmarks.true_costs import CHAT, DEVICE, GROUPS, MOMENTS, Mix, shares, show_shares


def test_a_mean_request_costs_what_its_rows_do() -> None:
    mix = Mix("x", 1000, 10)
    rates = DEVICE.rates
    assert mix.seconds == pytest.approx(1000 * rates.prefill + 10 * rates.decode + 10_000 * rates.decode_context)


def test_shares_add_up() -> None:
    assert shares({"a": 3.0, "b": 1.0}) == {"a": 0.75, "b": 0.25}


def test_tenants_with_the_same_requests_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labs.benchmarks.true_costs.GROUPS", ((CHAT, CHAT._replace(name="the same")),))
    report = Report("true costs")
    show_shares(report, (1,), (5.0, 20.0))
    share, growth = report.targets
    assert share.value < 0.02 and growth.value < 0.05  # the bounded gap of the first seconds is in the growth of so few


@pytest.mark.nightly
def test_every_tenant_of_every_group_is_shown() -> None:
    report = Report("true costs")
    show_shares(report, (1,), [moment / 30 for moment in MOMENTS])
    told, gaps = report.tables.values()
    assert [row["tenant"] for row in told] == [mix.name for group in GROUPS for mix in group]
    assert len(gaps) == len(GROUPS) and all(len(row) == 1 + len(MOMENTS) for row in gaps)

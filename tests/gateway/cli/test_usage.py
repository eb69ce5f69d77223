import csv
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path

import pytest

from gateway.tenants.usage import Entry, cost, usage_csv, usage_table
from quotas.embedded.embedded_store import EmbeddedStore
from quotas.policy.policy import CLASSES, DEFAULTS, Policy, Price
from quotas.reservation import Usage
from tests.gateway.cli.conftest import Printed, Sluice
from tests.gateway.spending import spend

Rows = Callable[..., list[dict[str, str]]]

POLICY = """
tenants:
  acme: {price: {input: 0.5/1M, cached_input: 0.1/1M, output: 1.5/1M, currency: USD}}
  beta: {price: {input: 1/1k, output: 2/1k, currency: EUR}}
"""
TODAY = datetime.now(UTC).date()
UNPRICED = Policy.of(CLASSES, DEFAULTS)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SLUICE_POLICY", str(policy))
    monkeypatch.delenv("SLUICE_REDIS_URL", raising=False)


@pytest.fixture
def rows(printed: Printed) -> Rows:
    return lambda *arguments: list(csv.DictReader(StringIO(printed("usage", "--csv", *arguments))))


def test_settled_usage_is_told_by_tenant_with_its_cost(redis_url: str, rows: Rows) -> None:
    for key in ("k1", "k2"):
        spend(redis_url, "acme", key, Usage(1_000_000, 100_000, 400_000, 2e9), day=TODAY)
    spend(redis_url, "beta", None, Usage(3, 1), day=TODAY)
    spend(redis_url, "carol", "k3", Usage(7, 8), day=TODAY)
    acme, beta, carol = rows("--redis-url", redis_url, "--from", TODAY, "--to", TODAY)
    told = "day tenant requests input_tokens cached_tokens output_tokens reasoning_tokens kv_byte_seconds cost currency"
    values = (str(TODAY), "acme", "2", "2000000", "800000", "200000", "0", "4000000000", "0.98", "USD")
    assert acme == dict(zip(told.split(), values, strict=True))
    assert (beta["cost"], beta["currency"]) == ("0.005", "EUR")
    assert (carol["output_tokens"], carol["cost"], carol["currency"]) == ("8", "", "")


def test_days_keys_and_tenants_may_be_chosen(redis_url: str, rows: Rows) -> None:
    before = TODAY - timedelta(days=40)
    for number, day in enumerate((before, before + timedelta(days=1), before + timedelta(days=2)), start=1):
        for tenant in ("acme", "beta"):
            spend(redis_url, tenant, "k1", Usage(number, 0), day=day)
    where = ("--redis-url", redis_url, "--from", str(before), "--to", str(before + timedelta(days=1)))
    found = [(row["tenant"], row["input_tokens"]) for row in rows(*where)]
    assert found == [("acme", "1"), ("beta", "1"), ("acme", "2"), ("beta", "2")]
    keys = [(row["tenant"], row["key"]) for row in rows(*where, "--tenant", "beta", "--by", "key")]
    assert keys == [("beta", "k1")] * 2
    assert rows("--redis-url", redis_url, "--from", TODAY, "--to", TODAY) == []


def test_the_table_ends_with_the_sums(redis_url: str, printed: Printed) -> None:
    spend(redis_url, "acme", "k1", Usage(2_000_000, 0), day=TODAY)
    spend(redis_url, "acme", None, Usage(0, 2), day=TODAY)
    spend(redis_url, "beta", None, Usage(1, 0), day=TODAY)
    out = printed("usage", "--redis-url", redis_url, "--from", TODAY, "--to", TODAY, "--by", "key")
    heading, *lines = [line.split() for line in out.splitlines()]
    assert heading == ["day", "tenant", "key", "requests", "input", "cached", "output", "reasoning", "kv_gib_s", "cost"]
    assert lines == [
        [str(TODAY), "acme", "-", "1", "0", "0", "2", "0", "0.000", "0.000003", "USD"],
        [str(TODAY), "acme", "k1", "1", "2000000", "0", "0", "0", "0.000", "1.00", "USD"],
        [str(TODAY), "beta", "-", "1", "1", "0", "0", "0", "0.000", "0.001", "EUR"],
        ["total", "3", "2000001", "0", "2", "0", "0.000", "0.001", "EUR"],
        ["1.000003", "USD"],
    ]


def test_the_embedded_store_is_asked_whether_or_not_a_gateway_runs(tmp_path: Path) -> None:
    range_ = ["--from", str(TODAY), "--to", str(TODAY)]
    command = [sys.executable, "-m", "gateway.cli.main", "usage", "--csv", *range_]
    with EmbeddedStore(tmp_path / "state") as url:
        spend(url, "acme", None, Usage(11, 0), day=TODAY)
        beside = subprocess.run(command, capture_output=True, text=True, check=True)
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    assert beside.stdout == alone.stdout
    assert f"{TODAY},acme,1,11,0,0,0,0,0.0000055,USD\n" in alone.stdout
    assert alone.stderr == ""


def test_where_no_gateway_has_run_it_says_so_and_makes_nothing(tmp_path: Path, sluice: Sluice) -> None:
    done = sluice("usage")
    assert (done.status, f"there is no {tmp_path / 'state' / 'store'}" in done.err) == (1, True)
    assert not (tmp_path / "state").exists()


def test_a_store_that_cannot_be_reached_is_named(sluice: Sluice) -> None:
    done = sluice("usage", "--redis-url", "unix:///nowhere.sock")
    assert (done.status, "the quota store cannot be reached" in done.err) == (1, True)


@pytest.mark.parametrize("arguments", [["--from", "yesterday"], ["--tenant", "a b"], ["--by", "day"]])
def test_a_wrong_flag_exits_with_2(sluice: Sluice, arguments: list[str]) -> None:
    assert sluice("usage", *arguments).status == 2


def test_a_range_that_ends_before_it_begins_is_refused(sluice: Sluice) -> None:
    done = sluice("usage", "--from", "2026-02-02", "--to", "2026-02-01")
    assert (done.status, "--from 2026-02-02 is after --to 2026-02-01" in done.err) == (2, True)


def test_a_range_of_all_time_asks_no_more_than_what_is_kept(redis_url: str, rows: Rows) -> None:
    spend(redis_url, "acme")
    (row,) = rows("--redis-url", redis_url, "--from", "0001-01-01", "--to", "2999-12-31", "--tenant", "acme")
    assert row["output_tokens"] == "5"


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1", "@x", "\uff1d1", "\t=1", "a\x1b[2J", "a\r\nb", '"=1'])
def test_no_name_is_a_formula_or_steers_a_terminal(name: str) -> None:
    entries = [Entry(date(2026, 1, 2), name, name, {None: Usage(1, 1)})]
    texts = usage_csv(entries, column="key"), usage_table(entries, column="key")
    for text in texts:
        assert all(character.isprintable() or character == "\n" for character in text)
    (row,) = csv.DictReader(StringIO(texts[0]))
    assert row["tenant"] == row["key"]
    assert row["tenant"][0] not in "=+-@\uff1d"


def test_hostile_keys_in_the_store_are_shown_inert(redis_url: str, rows: Rows) -> None:
    spend(redis_url, "a\x1b[2J", "=1+1|\u202e")
    (row,) = rows("--redis-url", redis_url, "--by", "key")
    assert (row["tenant"], row["key"]) == (r"a\x1b[2J", r"'=1+1|\u202e")


def test_the_part_of_a_use_in_batches_costs_its_share() -> None:
    price = Price(Decimal("1e-6"), Decimal("4e-6"), Decimal("5e-7"), Decimal("1e-5"), "USD", Decimal("0.25"))
    in_batch = {"batch_input_tokens": 200, "batch_output_tokens": 20, "batch_reasoning_tokens": 10}
    apart = Usage(100, 10, 40, reasoning_tokens=5), Usage(200, 20, reasoning_tokens=10, **in_batch)
    assert cost(apart[0], price) == Decimal("0.00015") and cost(apart[1], price) == Decimal("0.000085")
    assert cost(apart[0] + apart[1], price) == Decimal("0.000235")


def test_a_cost_is_exact_however_many_tokens_it_is_of() -> None:
    price = Price(Decimal("0.000000123456789"), Decimal("999.999999999999999"), Decimal("1e-15"), Decimal(7), "USD")
    usage = Usage(input_tokens=2**53, output_tokens=2**53 - 1, cached_tokens=1)
    expected = (2**53 - 1) * 123_456_789 + 1 + (2**53 - 1) * 999_999_999_999_999_999
    assert cost(usage, price) == Decimal(f"{expected}e-15")

from collections.abc import Sequence
from datetime import date

import pytest

from gateway.tenants.usage import Grouping
from gateway.tenants.usage_sums import UsageSums, entries_within
from quotas.policy.limit import EPOCH
from quotas.policy.policy_file import parse_policy
from quotas.store.usage_ledger import ENTRY, LedgerRows

DAY = date(2026, 11, 28)
POLICY = parse_policy({"policy.yaml": b"tenants: {}"})


def sums_of(kv: Sequence[float], requests: int = 1) -> UsageSums:
    """Of one entry for each of the KV byte seconds."""
    number = (DAY - EPOCH).days
    words = list[bytes]()
    for key, held in enumerate(kv):
        words += b"%d k%d" % (number // 8, key), ENTRY.pack(number, requests, 0, 0, 0, held, 0, 0)
    sums = UsageSums(POLICY, Grouping("tenant"), DAY, DAY)
    sums.add(entries_within([LedgerRows("a", DAY.replace(day=1), words)], DAY, DAY))
    return sums


@pytest.mark.parametrize("kv", [[2.0**62] * 5, [1e22, 1.0], [2.0**52 + 1] * 9, [2.0**33, -1.0], [-(2.0**40), 3.0]])
def test_kv_byte_seconds_add_up_exactly_beyond_64_bits(kv: list[float]) -> None:
    sums = sums_of(kv)
    for used, _ in (sums.of_owner(("a", "")), *sums.of_days(), sums.of_all()):
        assert (used.kv_byte_seconds, used.requests) == (sum(map(int, kv)), len(kv))


def test_a_group_that_held_kv_alone_is_told() -> None:
    assert sums_of([2.0**40], requests=0).tokens() == {("a", ""): 0}
    assert sums_of([0.0], requests=0).tokens() == {}


def ledger_of(tenant: str, *days_ago: int) -> LedgerRows:
    """Of one request on each of these days before `DAY`."""
    number = (DAY - EPOCH).days
    entries = [ENTRY.pack(number - ago, 1, 5, 0, 2, 0, 0, 0) for ago in days_ago]
    return LedgerRows(tenant, DAY.replace(day=1), [b"%d k" % (number // 8), b"".join(entries)])


@pytest.mark.parametrize("pages", [["idle"], ["idle", "busy"], ["busy", "idle"], ["damaged"], [""]])
def test_a_page_without_use_on_these_days_makes_no_group_and_adds_nothing(pages: list[str]) -> None:
    damaged = LedgerRows("damaged", DAY.replace(day=1), [b"1 k", b"odd"])
    ledgers = {"idle": ledger_of("idle", 1), "busy": ledger_of("busy", 1, 0), "damaged": damaged}
    sums = UsageSums(POLICY, Grouping("tenant"), DAY, DAY)
    for page in pages:
        sums.add(entries_within([ledgers[page]] if page else [], DAY, DAY))
    used, expected = sums.of_all()[0], "busy" in pages
    assert sums.tokens() == ({("busy", ""): 7} if expected else {}) and list(sums.owners) == list(sums.tokens())
    assert (used.requests, len(sums.of_days()), sums.num_damaged) == (expected, 1, "damaged" in pages)

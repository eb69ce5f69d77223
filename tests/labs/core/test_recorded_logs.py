"""Event logs that were recorded once are decided again to the byte by the core of today.

One that is not has caught a change of what the core decides, or of how a log is written. Where that is meant, the
logs are deleted and recorded anew, and the commit says what is decided otherwise (`scripts/record_logs.py`); where it
is not, the line that differs says what happened. All names here are those of the log,
which no renaming in the code may change.
"""

import builtins
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from math import fsum
from pathlib import Path
from typing import Any

import pytest

from admission.core import MemoryGate
from admission.event_logs.event_log import VERSION, replay
from backend.config import Batching
from labs import choices  # noqa: F401 - adds orders and batching rules
from labs.orderings import published

RECORDED = Path(__file__).with_name("recorded")
LOGS = {path.name.removesuffix(".log.gz"): path for path in sorted(RECORDED.glob("*.log.gz"))}
CHOICES = {
    "order": {"fair", "fcfs", *published.ORDERS},
    "memory": set(MemoryGate),
    "overload": {"deadline", "controlled_delay", "bounded", "unbounded"},
    "batching": set(Batching),
    "kv_allocation": {"paged", "contiguous"},
}
Entry = list[Any]


@pytest.fixture(scope="module")
def logs() -> dict[str, list[Entry]]:
    """The entries of each log, by its name."""
    return {name: [without_cache(json.loads(line)) for line in lines(path)] for name, path in LOGS.items()}


@pytest.fixture(scope="module")
def cached() -> list[tuple[str, dict[str, Any]]]:
    """What entries of all logs tell of the prefix cache, each with its kind."""
    entries = (json.loads(line) for path in LOGS.values() for line in lines(path))
    return [(entry[0], entry[-1]) for entry in entries if isinstance(entry[-1], dict) and entry[0] != "log"]


def without_cache(entry: Entry) -> Entry:
    """Returns an entry as it would be if nothing happened in the prefix cache."""
    return entry[:-1] if isinstance(entry[-1], dict) and entry[0] != "log" else entry


def lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from file


def every(kind: str, logs: dict[str, list[Entry]]) -> list[Entry]:
    return [entry for log in logs.values() for entry in log if entry[0] == kind]


def ends(log: list[Entry]) -> dict[str, str]:
    """Returns how each sequence ended, or was refused, by its id."""
    found: dict[str, str] = {}
    for entry in log:
        match entry:
            case ["arrive", _, name, *_, str(refusal), _, _, _, _]:
                found[name] = refusal
            case ["finish", _, name, reason]:
                found.setdefault(name, reason)
            case ["plan", *_, given_up]:
                found |= given_up
            case ["done", _, _, _, by_token, full, _]:
                found |= dict.fromkeys(by_token, "end token") | dict.fromkeys(full, "max_tokens")
    return found


def preempted(log: list[Entry]) -> Counter[str]:
    """Counts how often each sequence was preempted."""
    return Counter(
        name for kind, *said in log if kind in ("plan", "lost") for name in said[{"plan": 5, "lost": 2}[kind]]
    )


@pytest.mark.parametrize("name", LOGS)
def test_a_recorded_log_is_decided_again_to_the_byte(name: str) -> None:
    recorded = list(lines(LOGS[name]))
    assert json.loads(recorded[0])[:2] == ["log", VERSION]
    assert len(list(replay(recorded))) == len(recorded)


@pytest.mark.parametrize("name", ["fair", "vtc", "flood", "served"])
def test_a_python_that_sums_floats_exactly_decides_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `sum` does nearly, from Python 3.12 on."""
    plain = sum

    def exact(values: Iterable[Any], start: Any = 0) -> Any:
        values = list(values)
        floats = any(isinstance(value, float) for value in values)
        return start + fsum(values) if floats else plain(values, start)

    monkeypatch.setattr(builtins, "sum", exact)
    assert list(replay(lines(LOGS[name])))


def test_the_logs_are_small() -> None:
    assert sum(path.stat().st_size for path in LOGS.values()) < 360 * 1024


# what they hold, so that it stays in them


def test_they_hold_every_kind_of_entry(logs: dict[str, list[Entry]]) -> None:
    kinds = Counter(entry[0] for log in logs.values() for entry in log)
    assert kinds.keys() == {
        "log",
        "gateway",
        "request",
        "arrive",
        "finish",
        "allow",
        "extend",
        "policy",
        "plan",
        "done",
        "lost",
        "cache",
        "pin",
        "calibrate",
        "calibrated",
        "charge",
        "debts",
    }
    assert min(kinds.values()) >= 5


def test_each_choice_of_a_core_was_made_and_each_setting_had_two_values(logs: dict[str, list[Entry]]) -> None:
    met = defaultdict(set)
    for _, _, engine, core, *prior in every("log", logs):
        for name, value in ({"speculate": "off"} | engine | core | {"prior": prior}).items():
            met[name].add(str(value))
    assert {name: met[name] for name in CHOICES} == CHOICES
    assert [name for name, values in met.items() if len(values) < 2] == []


def test_every_refusal_is_in_them_by_each_reason_for_it(logs: dict[str, list[Entry]]) -> None:
    refused = {name: end for name, end in ends(logs["refusals"]).items() if name.startswith("refused-")}
    assert refused == {
        "refused-first-token": "DeadlineUnmeetable",
        "refused-last-token": "DeadlineUnmeetable",
        "refused-tenant-bound": "TenantQueueFull",
        "refused-tenant-limit": "TenantQueueFull",
        "refused-class-bound": "QueueFull",
        "refused-shared-bound": "QueueFull",
    }
    assert Counter(ends(logs["shared_bounds"]).values())["QueueFull"] == 8, "by each unit, of all and of a class"
    assert Counter(ends(logs["tenant_bounds"]).values())["TenantQueueFull"] == 4
    told = Counter(entry[15] for entry in every("arrive", logs) if entry[15])
    assert told.keys() == set(refused.values()) and min(told.values()) > 20


def test_clients_left_in_each_state(logs: dict[str, list[Entry]]) -> None:
    left = ends(logs["cancels"])
    states = ("waiting-0", "in-prefill", "decoding-0", "preempted", "waiting-again")
    assert {left[f"cancelled-{state}"] for state in states} == {"cancelled"}
    assert ends(logs["leases"])["cancelled-passed-over"] == "cancelled"
    paused = ends(logs["extensions"])
    assert (paused["paused-and-left-0"], paused["paused-and-left-1"]) == ("cancelled", "stop")
    assert (left["stopped-by-text"], left["stopped-by-token"], left["failed"]) == ("stop", "end token", "failed")
    after_its_end = [entry for entry in logs["cancels"] if entry[0] == "finish" and entry[2] == "stopped-by-token"]
    assert after_its_end, "an ended request is not ended again"
    assert {entry[3] for entry in every("finish", logs)} == {"cancelled", "stop", "failed", "grammar"}
    assert left["allowed-nothing"] == "grammar"


def test_there_were_rows_without_numbers(logs: dict[str, list[Entry]]) -> None:
    failed = [name for entry in logs["failures"] if entry[0] == "done" for name in entry[6]]
    assert failed == ["failed-prompt", "failed-together-0", "failed-together-1", "failed-between-tokens"]
    assert any(entry[0] == "done" and entry[6] for entry in logs["failing"])


def test_grammars_forced_tokens_up_to_ends_and_limits(logs: dict[str, list[Entry]]) -> None:
    jumped = [(name, count) for entry in logs["jumps"] if entry[0] == "done" for name, count in entry[7:8] and entry[7]]
    assert {"forced", "forced-to-the-end", "forced-within-a-limit"} == {name for name, _ in jumped}
    assert ("forced-to-the-end", 19) in jumped
    assert ("forced-within-a-limit", 3) in jumped


def test_requests_were_given_up_for_each_reason(logs: dict[str, list[Entry]]) -> None:
    assert {reason for entry in every("plan", logs) for _, reason in entry[-1]} == {"expired", "preempted"}
    expired = {name for name, end in ends(logs["give_ups"]).items() if end == "expired"}
    assert expired >= {"expired-waiting", "expired-in-prefill", "expired-between-tokens"}
    assert any(end == "expired" for end in ends(logs["controlled_delay"]).values())
    assert any(end == "preempted" for end in ends(logs["past_bound"]).values())


def test_preemptions_are_for_memory_for_a_class_at_a_lease_in_a_deadlock_and_for_lost_steps(
    logs: dict[str, list[Entry]],
) -> None:
    reasons = ("for-memory", "for-slot", "for-class", "in-deadlock")
    names = preempted(logs["preemptions"])
    assert [reason for reason in reasons if not any(f"preempted-{reason}" in name for name in names)] == []
    assert preempted(logs["leases"])["gives-way"] >= 1
    assert len(preempted(logs["leases_of_many"])) == 5
    assert preempted(logs["paused_in_the_way"]) == {"gives-way-paused": 1}
    assert preempted([entry for entry in logs["losses"] if entry[0] == "lost"])


def test_steps_were_lost_alone_and_with_one_behind_them(logs: dict[str, list[Entry]]) -> None:
    met, in_flight = set(), 0
    for kind, _, *said in logs["losses"]:
        if kind == "lost":
            met.add(in_flight)
        in_flight = {"lost": 0, "done": in_flight - 1, "plan": in_flight + (said[0] is not None)}.get(kind, in_flight)
    assert met == {1, 2}


def test_requests_wait_for_each_obstacle(logs: dict[str, list[Entry]]) -> None:
    plans = every("plan", logs)
    assert {entry[7][0] for entry in plans if entry[7]} == {"batch", "peers", "release", "budget", "slots", "memory"}
    assert {limit for entry in plans for limit in (entry[8] or {}).values()} == {"allowance", "tokens"}
    assert any(entry[2] is None for entry in plans) and any(entry[3] and entry[5] for entry in plans)


def test_blocks_are_found_given_up_and_named(cached: list[tuple[str, dict[str, Any]]]) -> None:
    told = Counter(f"{kind} {what}" for kind, said in cached for what in said)
    of_plans = ("plan found", "plan forked", "plan evicted", "plan idle", "plan blocks")
    wanted = (*of_plans, "done blocks", "finish blocks", "lost blocks")
    assert [what for what in wanted if not told[what]] == []


def test_caches_have_floors_and_ceilings(logs: dict[str, list[Entry]]) -> None:
    limits = {tuple(entry[3:]) for entry in every("cache", logs)}
    assert any(floor for floor, _ in limits) and {ceiling is None for _, ceiling in limits} == {True, False}


def test_prefixes_are_pinned_and_let_go(logs: dict[str, list[Entry]]) -> None:
    assert {bool(blocks) for *_, blocks in every("pin", logs)} == {True, False}


def test_leases_are_given_cut_and_lifted_and_extensions_come_in_time_and_late(logs: dict[str, list[Entry]]) -> None:
    leases = [entry[3] for entry in logs["leases"] if entry[0] == "allow" and entry[2] == "a"]
    assert leases == [30, 6, 14, None]
    extended = [entry[2] for entry in logs["extensions"] if entry[0] == "extend"]
    assert {"paused", "held"} <= set(extended) and len(extended) > len(set(extended))


def test_policies_change_everything_that_they_may(logs: dict[str, list[Entry]]) -> None:
    terms = [entry[2] for entry in every("policy", logs)]
    assert all(any(one[place] for one in terms) for place in range(4))
    assert all(any(bound[unit] for one in terms for bound in one[2]) for unit in range(4))
    assert any("" in may_wait for *_, may_wait in terms)


def test_requests_are_told_with_all_that_they_have_and_unread(logs: dict[str, list[Entry]]) -> None:
    requests = every("request", logs)
    assert all(any(entry[place] is not None for entry in requests) for place in range(2, 12))
    assert all(any(entry[place] is None for entry in requests) for place in (4, 5, 7, 8, 9, 11))
    assert {len(entry[10]) for entry in requests} >= {0, 1, 2}
    assert {tuple(prompt[2:]) for entry in requests for prompt in entry[10]} >= {(True,), (False,), (True, True)}
    assert any(entry[11] and entry[10] for entry in requests) and any(entry[11] and not entry[10] for entry in requests)


def test_one_is_of_a_real_server(logs: dict[str, list[Entry]]) -> None:
    kinds = Counter(entry[0] for entry in logs["served"])
    assert kinds.keys() >= {"gateway", "request", "arrive", "finish", "allow", "extend", "policy", "plan", "done"}
    assert {"QueueFull", "TenantQueueFull", "DeadlineUnmeetable"} <= set(ends(logs["served"]).values())

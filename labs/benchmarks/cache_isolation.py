"""A tenant's chance to tell by the clock what another tenant has cached, tried as an attacker over HTTP would.

In each pair a victim sends a fresh prompt; an attacker then sends that same prompt and another fresh one of the same
length, in random order, and measures the time to the first event of each. A leak's effect is measured beside it: the
attacker sends its own prompt again, and hits it; and so does a tenant of the victim's sharing group. Prompts are sent
as texts of made-up words, so that a tokenizer that remembers words would show, and as token ids. The test is Wilcoxon's
signed-rank test, two-sided, at level 0.01: it fails an innocent server once in a hundred series. Its power is found by
resampling the measured pairs.

All of it is done with one process, with an HTTP worker beside the engine's process, and while a fourth tenant keeps two
streams going. The clock of a busy server is noisier, so that mode has more pairs.
"""

import http.client
import json
import os
import string
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from labs.benchmarks import machine
from labs.benchmarks.paired import median_difference, power, signed_rank_p
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, scenario_parser
from labs.benchmarks.served import Served, served

POLICY = """\
tenants: {attacker: {}, victim: {}, friend: {}, neighbour: {}}
prefix_sharing: {family: [victim, friend]}
"""
TENANTS, NEIGHBOUR = ("attacker", "victim", "friend"), "neighbour"
NUM_TOKENS = 512  # of a prompt of ids; of one of words it is about this
NUM_WORDS = 62
PAIRS_PER_SALTED = 10  # one pair in ten tries a salt
SIGNIFICANCE_LEVEL = 0.01  # of the test; the confidence of intervals is its complement
LEAK_SHARE_OF_HIT = 0.05  # of a hit's effect: a larger difference is a leak
RESAMPLES = 1000
QUICK_PAIRS = 8
SHIFTS = (0.0, 0.005, 0.01, 0.02, LEAK_SHARE_OF_HIT)

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Mode:
    """A server, and its load beside the measurement."""

    name: str
    http_workers: int = 0
    streams: int = 0  # of the neighbour
    times_pairs: int = 1


MODES = {
    mode.name: mode
    for mode in (
        Mode("alone"),
        Mode("HTTP worker", http_workers=1),
        Mode("under load", streams=2, times_pairs=2),
    )
}


@dataclass(slots=True)
class Answer:
    """The client's view of a stream."""

    first: float  # seconds to the first event
    cached: int  # as its usage says
    prompt_tokens: int


class Client:
    """One tenant with one connection, which is kept."""

    def __init__(self, server: Served, tenant: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._headers = {"authorization": f"Bearer {server.keys[tenant]}", "content-type": "application/json"}

    def ask(self, prompt: Prompt, salt: str | None = None) -> Answer:
        """Send a prompt and read one token and the usage. Raises `RuntimeError` for any other answer."""
        body: dict[str, object] = {
            "model": "embedded",
            "prompt": prompt,
            "max_tokens": 1,
            "stream": True,
            "ignore_eos": True,
        }
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
        content = json.dumps(body if salt is None else body | {"cache_salt": salt}).encode()
        started = time.perf_counter()
        self._connection.request("POST", "/v1/completions", content, self._headers)
        response = self._connection.getresponse()
        line = response.readline()
        first = time.perf_counter() - started
        lines = [line, *response.readlines()]
        if response.status != http.client.OK or not line.startswith(b"data: "):
            raise RuntimeError(f"the server answered {response.status}: {b''.join(lines)[:500]!r}")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        usage = events[-1]["usage"]
        return Answer(first, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])

    def close(self) -> None:
        self._connection.close()


@dataclass(slots=True)
class Series:
    """Answers to one kind of prompts, pair by pair."""

    cached_by_other: list[Answer] = field(default_factory=list)  # the attacker's, of the victim's prompts
    cached_by_nobody: list[Answer] = field(default_factory=list)
    own: list[Answer] = field(default_factory=list)  # the attacker's, of what it has just sent
    of_victim: list[Answer] = field(default_factory=list)  # its prompt again: it had been there all the time
    of_friend: list[Answer] = field(default_factory=list)  # of the victim's prompts
    salted: list[Answer] = field(default_factory=list)  # the attacker's own prompt, with a salt

    @property
    def differences(self) -> list[float]:
        pairs = zip(self.cached_by_other, self.cached_by_nobody, strict=True)
        return [other.first - nobody.first for other, nobody in pairs]

    @property
    def hits(self) -> list[float]:
        """The gain of a hit in each pair: the seconds by which its answer began earlier."""
        return [miss.first - hit.first for miss, hit in zip(self.cached_by_nobody, self.own, strict=True)]

    @property
    def friends(self) -> list[float]:
        return [miss.first - hit.first for miss, hit in zip(self.cached_by_nobody, self.of_friend, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--pairs", type=int, default=600, help="of each kind of prompts and run")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.pairs = 1, QUICK_PAIRS
    report = Report("cache_isolation", options.quick)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    random = Random(options.seed)
    kinds: dict[str, Callable[[], Prompt]] = {"text": lambda: _text(random), "token ids": lambda: _ids(random)}
    for name in options.modes:
        mode, measured = MODES[name], {kind: Series() for kind in kinds}
        pairs = options.pairs if options.quick else mode.times_pairs * options.pairs
        for _ in range(options.runs):
            _measure(mode, pairs, server_core, random, kinds, measured)
        _tell(report, mode, measured)
    return report.finish(options.results)


def _text(random: Random) -> str:
    return " ".join("".join(random.choices(string.ascii_lowercase, k=8)) for _ in range(NUM_WORDS))


def _ids(random: Random) -> list[int]:
    return [random.randrange(5, 500) for _ in range(NUM_TOKENS)]


def _measure(
    mode: Mode,
    pairs: int,
    core: int,
    random: Random,
    kinds: dict[str, Callable[[], Prompt]],
    measured: dict[str, Series],
) -> None:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder)
        policy = directory / "policy.yaml"
        policy.write_text(POLICY)
        settings = {"policy": policy, "refused_per_second": 10000, "http_workers": mode.http_workers}
        server = stack.enter_context(served(core, (*TENANTS, NEIGHBOUR), directory / "state", **settings))
        neighbour = _neighbour(server, mode.streams, stack) if mode.streams else None
        clients = {tenant: Client(server, tenant) for tenant in TENANTS}
        for kind in kinds.values():  # a server that has just begun is slower
            for _ in range(10):
                clients["attacker"].ask(kind())
        for _ in range(pairs):
            for name, kind in kinds.items():  # in turns, so that both see the same drift
                _measure_pair(clients, random, kind, measured[name])
        for client in clients.values():
            client.close()
        if neighbour is not None:
            print(f"the neighbour has sent {neighbour.ask()['requests']:,} requests")


def _neighbour(server: Served, streams: int, stack: ExitStack) -> Worker:
    arguments = (str(server.port), server.keys[NEIGHBOUR], str(streams))
    core = machine.two_cores()[1]
    return stack.enter_context(Worker.module("labs.benchmarks.neighbour", *arguments, core=core))


def _measure_pair(clients: dict[str, Client], random: Random, prompt: Callable[[], Prompt], series: Series) -> None:
    attacker, victim, friend = (clients[tenant] for tenant in TENANTS)
    of_victim, of_nobody = prompt(), prompt()
    victim.ask(of_victim)
    probes = [(of_victim, series.cached_by_other), (of_nobody, series.cached_by_nobody)]
    random.shuffle(probes)
    for asked, answers in probes:
        answers.append(attacker.ask(asked))
    series.own.append(attacker.ask(of_nobody))
    series.of_friend.append(friend.ask(of_victim))
    series.of_victim.append(victim.ask(of_victim))
    if len(series.own) % PAIRS_PER_SALTED == 1:
        series.salted.append(attacker.ask(of_nobody, salt="victim"))


def _tell(report: Report, mode: Mode, measured: dict[str, Series]) -> None:
    confidence = 1 - SIGNIFICANCE_LEVEL
    rows: list[dict[str, object]] = []
    powers: list[dict[str, object]] = []
    for kind, series in measured.items():
        between = median_difference(series.differences, confidence)
        effect = median_difference(series.hits, confidence)
        group = median_difference(series.friends, confidence)
        p = signed_rank_p(series.differences)
        rows.append(
            {
                "prompts": kind,
                "pairs": len(series.differences),
                "another's, ms": 1e3 * median(answer.first for answer in series.cached_by_other),
                "nobody's, ms": 1e3 * median(answer.first for answer in series.cached_by_nobody),
                "difference, us": 1e6 * between.estimate,
                "from, us": 1e6 * between.low,
                "to, us": 1e6 * between.high,
                "p": p,
                "own hit sooner by, ms": 1e3 * effect.estimate,
                "in a group, ms": 1e3 * group.estimate,
            }
        )
        found = [power(series.differences, shift * effect.estimate, SIGNIFICANCE_LEVEL, RESAMPLES) for shift in SHIFTS]
        powers.append({"prompts": kind} | {f"{shift:.1%}": each for shift, each in zip(SHIFTS, found, strict=True)})
        report.at_least(f"p of a difference, {kind}, {mode.name}", p, SIGNIFICANCE_LEVEL)
        farthest = between.farthest / effect.estimate
        report.at_most(
            f"farthest end of its {confidence:.0%} interval, in effects of a hit, {kind}, {mode.name}",
            farthest,
            LEAK_SHARE_OF_HIT,
        )
        report.at_least(f"power at {LEAK_SHARE_OF_HIT:.0%} of a hit, {kind}, {mode.name}", found[-1], 0.9)
        report.at_least(
            f"sooner in a sharing group, in effects of a hit, {kind}, {mode.name}", group.low / effect.estimate, 0.9
        )
        _tell_counts(report, mode, kind, series)
    report.add_table(f"{mode.name}: time to the first event; intervals of {confidence:.0%}", rows)
    title = f"{mode.name}: how often the test at {SIGNIFICANCE_LEVEL} rejects a difference of so much of a hit's effect"
    report.add_table(title, powers)
    report.notes = ["difference: the attacker's wait for what another tenant has cached, less that for what nobody has"]


def _tell_counts(report: Report, mode: Mode, kind: str, series: Series) -> None:
    """Check the counts, which have no noise: each wrong one is a leak."""
    missed = [*series.cached_by_other, *series.cached_by_nobody, *series.salted]
    found = [*series.own, *series.of_victim, *series.of_friend]
    whole = sum(answer.cached >= answer.prompt_tokens - 1 - 16 for answer in found)
    report.at_most(
        f"cached tokens said of what was another's, nobody's or salted, {kind}, {mode.name}",
        sum(a.cached for a in missed),
        0,
    )
    report.at_least(
        f"share of own and shared prompts that were found whole, {kind}, {mode.name}", whole / len(found), 1
    )


if __name__ == "__main__":
    sys.exit(main())

"""Runs a scenario against a server, at one load or at several, and puts the results together."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random
from typing import Any, NamedTuple

from gateway.settings.machine import allow_files
from labs.bench.exchange import Outcome
from labs.bench.generator import Generator, TenantLoad
from labs.bench.probe import ModelFacts, probe
from labs.bench.remarks import remarks
from labs.bench.scenario import Scenario, TenantTraffic
from labs.bench.settlement import Account, Ledger, Settlement, settlements
from labs.bench.summary import Summary, phases_of, summarise
from labs.bench.wire import Address
from labs.bench.workloads import WORKLOADS, Prose, Session, Sessions
from labs.simulation.search.sweep import KNEE_GOODPUT
from labs.simulation.traces import read_traffic

MAX_FILES = 65_536
Tick = Callable[[Generator], None]


class Fault(NamedTuple):
    """An action that breaks or mends something `at` seconds from the start. It may not take long: it stops the load."""

    at: float
    action: Callable[[], object]


def running(command: str) -> Callable[[], object]:
    """An action that runs a command, which may outlive the benchmark: it may be a restarted server."""
    words = shlex.split(command)
    return lambda: os.posix_spawnp(words[0], words, os.environ)


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a scenario."""

    load: float
    summary: Summary
    settlements: list[Settlement]
    remarks: list[str]
    phases: dict[str, Summary]

    @property
    def is_settled(self) -> bool:
        """False if a tenant was charged something else than it was told, and no cut stream explains it."""
        return all(one.is_exact or one.num_cut for one in self.settlements)


class Benchmark:
    """A scenario and its server, whose words were counted."""

    def __init__(self, url: str, scenario: Scenario, admin_url: str = "", admin_key: str = "") -> None:
        """Raises `OptionError` when there is no such server, or it refuses."""
        allow_files(MAX_FILES)
        self.scenario = scenario
        self.address = Address.of(url)
        base = url.rstrip("/").removesuffix("/v1")
        kinds: dict[tuple[str, str, str], ModelFacts] = {}
        self.models: dict[str, ModelFacts] = {}
        for name, tenant in scenario.tenants.items():
            kind = tenant.model, WORKLOADS[tenant.workload].kind, "" if tenant.model else tenant.secret
            if kind not in kinds:
                kinds[kind] = probe(base, tenant)
            self.models[name] = kinds[kind]
        keys = {name: tenant.secret for name, tenant in scenario.tenants.items()}
        self.ledger = Ledger(base, keys, admin_url, admin_key)
        self._account: Account | None = None  # after the last run

    def run(self, load: float = 1.0, tick: Tick = lambda _: None, faults: Sequence[Fault] = ()) -> Result:
        """Run at a multiple of the scenario's pace. Recovery counts from the first fault."""
        scenario = self.scenario.at_load(load)
        random = Random(f"{scenario.seed} {load:g}")
        makers = {name: self._sessions(name, tenant, random) for name, tenant in scenario.tenants.items()}
        loads = [_load(name, tenant, makers[name], random) for name, tenant in scenario.tenants.items()]
        generator = Generator(
            self.address,
            loads,
            seconds=scenario.seconds,
            drain=scenario.drain,
            timeout=scenario.timeout,
            random=random,
            tick=tick,
        )
        for fault in faults:
            generator.at(fault.at, partial(_break, generator, fault.action))
        before = self._account if self._account is not None else self.ledger.read_settled()
        run = generator.run()
        has_cut = any(one.outcome not in (Outcome.ANSWERED, Outcome.REFUSED) for one in run.exchanges)
        self._account = self.ledger.read_settled(has_cut)
        settled = settlements(run.exchanges, self.ledger.names, before, self._account)
        summary = summarise(run, scenario)
        doubts = [*remarks(run, scenario, summary), *self._fitting(makers), *_unsettled(settled)]
        return Result(load, summary, settled, doubts, phases_of(run, scenario))

    def _sessions(self, name: str, tenant: TenantTraffic, random: Random) -> Sessions:
        facts = self.models[name]
        named = WORKLOADS[tenant.workload]
        prompt, output = tenant.prompt_lengths or named.prompt, tenant.output_lengths or named.output
        workload = replace(named, prompt=prompt, output=output)
        prose = Prose(random, facts.tokens_per_word, facts.overhead)
        fields: dict[str, Any] = {"model": facts.name} if facts.name else {}
        if tier := tenant.service_tier or (workload.service_tier if self.ledger.is_sluice else ""):
            fields["service_tier"] = tier
        if tenant.leave and self.ledger.is_sluice and workload.kind != "embeddings":
            # a stream that is cut has told its use all the same
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return Sessions(workload, prose, random, facts.context, fields | tenant.body)

    def _fitting(self, makers: dict[str, Sessions]) -> Iterator[str]:
        for name, sessions in makers.items():
            context = self.models[name].context
            if sessions.num_cut:
                yield f"{sessions.num_cut} prompts of {name}'s trace were cut to the context of {context:,} tokens"
            elif sessions.is_fitted:
                yield f"the lengths of {name} are smaller than its workload's, to fit the context of {context:,} tokens"


def _unsettled(settled: list[Settlement]) -> Iterator[str]:
    for one in settled:
        if not one.is_exact and not one.num_cut:
            yield f"{one.tenant} was told {one.told:,} tokens and charged {one.charged:,}: did others use its keys?"


def _load(name: str, tenant: TenantTraffic, sessions: Sessions, random: Random) -> TenantLoad:
    arrivals: Iterator[tuple[float, Session]] = iter(())
    if tenant.rate is not None:
        arrivals = _renewals(tenant, sessions, random)
    elif tenant.trace is not None:
        arrivals = traced(name, tenant, sessions)
    return TenantLoad(
        name=name,
        headers=tenant.request_headers(),
        arrivals=arrivals,
        sessions=sessions.next,
        clients=tenant.clients or 0,
        start=tenant.start,
        stop=inf if tenant.stop is None else tenant.stop,
        think=tenant.think,
        leave=tenant.leave,
        slow=tenant.slow,
        retries=tenant.retries,
    )


def _renewals(tenant: TenantTraffic, sessions: Sessions, random: Random) -> Iterator[tuple[float, Session]]:
    """Arrivals with gamma distributed intervals; of shape 1 they are Poisson."""
    assert tenant.rate is not None
    moment, shape = tenant.start, tenant.burstiness
    while True:
        moment += random.gammavariate(shape, 1 / (tenant.rate * shape))
        yield moment, sessions.next()


def traced(name: str, tenant: TenantTraffic, sessions: Sessions) -> Iterator[tuple[float, Session]]:
    """The requests of a trace; if it knows a tenant of this name, only its own."""
    assert tenant.trace is not None
    arrivals = read_traffic(tenant.trace).arrivals
    own = [one for one in arrivals if one.tenant == name] or arrivals
    return ((tenant.start + one.time / tenant.speed, sessions.of_trace(one)) for one in own)


def _break(generator: Generator, action: Callable[[], object]) -> None:
    if generator.run_record.fault_at is None:
        generator.run_record.fault_at = generator.now
    action()


def knee(results: list[Result]) -> Result | None:
    """Return the result of the largest load at which `KNEE_GOODPUT` of the requests are good; None: of none."""
    good = [result for result in results if result.summary.all.goodput >= KNEE_GOODPUT]
    return max(good, key=lambda result: result.load, default=None)

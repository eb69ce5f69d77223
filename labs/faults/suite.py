"""Traffic of several tenants beside faults, each scenario with what it expects: `python -m labs.faults.suite [NAME …]`.

Each scenario is a file in `labs/faults/scenarios`: the policy, the traffic of `sluice bench`, the faults by the moment,
and the expectations. It is played on one gateway of the embedded model, and then on a router before two. Bounds of time
are ratios within a run. After each, nothing of any request may be left, and no error in a log.

With `--without-guard` the thing that a scenario guards is switched off, and it has to fail.
"""

import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import Field, ValidationError

from gateway.telemetry.event_log_file import read_event_log
from labs.bench.benchmark import Benchmark, Fault, Result
from labs.bench.scenario import Part, Positive, Scenario, ScenarioError
from labs.bench.summary import Figures, Latency, Summary
from labs.benchmarks.report import RESULTS, Report
from labs.faults.expectations import Expectation, Verdict
from labs.faults.release import released
from labs.faults.site import LEFT, Site
from labs.faults.timeline import Act
from labs.simulation.errors import SimulationError
from quotas.policy import units

SCENARIOS = Path(__file__).parent / "scenarios"
ALWAYS = (  # unless a scenario spares it
    *(f"left.{name} == 0" for name in (*LEFT, "held")),
    "complaints == 0",
)
MODEL = "embedded"
CAPACITY_CLIENTS = 12  # for each gateway's 8 seats
TIMED_OUT = "timeout"  # the failure without a space that is no server's code


class Guard(Part):
    """What a scenario guards, and how that is switched off."""

    what: str
    flags: dict[str, Any] = Field({})
    altered: str = ""
    policy: dict[str, Any] | None = None


class Play(Part):
    """One scenario, as its file says it."""

    about: str
    guard: Guard | None = None  # None: nothing switches it off
    policy: dict[str, Any]
    flags: dict[str, Any] = Field({})  # of each gateway
    altered: str = ""
    traffic: dict[str, Any]  # as `sluice bench --scenario` reads it; `tenant` names a policy's where names differ
    capacity: float = 0.0  # seconds in which the requests a second are measured that rates are multiples of
    faults: dict[str, str | list[str]] = Field({})
    expect: list[str]
    expect_one: list[str] = Field([])  # besides, of one gateway
    expect_fleet: list[str] = Field([])  # besides, of a router with several
    replicas: list[int] = Field([1, 2])  # of the sites that it is for
    spare: list[str] = Field([])  # of `ALWAYS`
    audit: bool = False  # replay the event logs
    fleet: Positive = 1.0  # times as much of each pace before two gateways


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(_names_in(SCENARIOS)))
    parser.add_argument(
        "--replicas", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="gateways of a site (default: 1 2)"
    )
    parser.add_argument("--without-guard", action="store_true", help="switch off what each scenario guards")
    parser.add_argument("--scenarios", type=Path, default=SCENARIOS, help="a folder of other ones")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    known = _names_in(options.scenarios)
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"{options.scenarios} has no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    plays = {name: read(options.scenarios / f"{name}.yaml") for name in options.names or known}
    if options.without_guard:
        plays = {name: play for name, play in plays.items() if play.guard}
    if not plays:
        parser.error("no chosen scenario has a guard" if options.without_guard else f"{options.scenarios} has none")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every program compiles our sources again
    report = Report("fault_guards" if options.without_guard else "faults")
    rows = [
        _row(report, name, play, replicas, options.without_guard)
        for name, play in plays.items()
        for replicas in [count for count in options.replicas if count in play.replicas] or play.replicas[:1]
    ]
    report.add_table("scenarios", rows)
    return report.finish(options.results)


def _names_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read(path: Path) -> Play:
    """Raises `SimulationError`, which names the file and the field."""
    try:
        play = Play.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        for text in play.expect + play.expect_one + play.expect_fleet:
            Expectation(text)
        list(_acts(play.faults))
        return play
    except ValidationError as error:
        raise ScenarioError(str(path), error) from None
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise SimulationError(f"{path}: {error}") from None


def _row(report: Report, name: str, play: Play, replicas: int, is_off: bool) -> dict[str, object]:
    where = "one gateway" if replicas == 1 else f"a router with {replicas}"
    began = time.monotonic()
    verdicts, result = perform(play, replicas, is_off)
    guard = play.guard.what if play.guard else ""
    took = time.monotonic() - began
    missed = [verdict for verdict in verdicts if not verdict.is_met]
    shown = missed if is_off else verdicts
    sys.stdout.write("\n  ".join([f"{name}, {where}, {took:.0f} s", *map(str, shown)]) + "\n")
    sys.stdout.flush()
    if is_off:
        report.at_least(f"{name}, {where}: expectations missed without {guard}", len(missed), 1)
        return {"scenario": name, "on": where, "without": guard, "missed": "; ".join(map(str, missed))}
    report.at_most(f"{name}, {where}: expectations missed, of {len(verdicts)}", len(missed), 0)
    told = {**result.summary.all.refusals, **result.summary.all.failures}
    report.notes += [f"{name}, {where}: {verdict}; clients were told {told or 'no error'}" for verdict in missed]
    recovered = result.summary.recovered_after
    return {
        "scenario": name,
        "on": where,
        "requests": result.summary.all.offered,
        "recovered after, s": "" if result.summary.fault_at is None else "never" if recovered is None else recovered,
        "took, s": took,
        "missed": "; ".join(verdict.expected for verdict in missed),
    }


def perform(play: Play, replicas: int, is_off: bool = False) -> tuple[list[Verdict], Result]:
    """Play a scenario once, and judge it."""
    guard = play.guard if is_off and play.guard else Guard(what="")
    acts = list(_acts(play.faults))
    with TemporaryDirectory(prefix="sluice-") as folder:
        with Site(
            Path(folder),
            guard.policy or play.policy,
            play.flags | guard.flags,
            replicas=replicas,
            has_logs=play.audit,
            altered=guard.altered or play.altered,
            links=sorted({act.link for _, act in acts if act.link}),
            has_clock=any(act.needs_clock for _, act in acts),
        ) as site:
            scenario = _scenario(play, site)
            if play.capacity:
                scenario = paced(scenario, capacity(site, play, scenario))
            pace = play.fleet if replicas > 1 else 1.0
            faults = [Fault(at, act.on(site)) for at, act in acts]
            benchmark = Benchmark(site.url, scenario)
            began = time.monotonic()  # the clock of the gateways' event logs
            result = benchmark.run(pace, site.tick, faults)
            figures = dict(_figures(result))
            figures |= {f"left.{name}": value for name, value in site.settled().items()}
            figures |= {f"metrics.{name}": value for name, value in site.metrics().items()}
            complaints = site.complaints()
        figures["complaints"] = float(len(complaints))
        if play.audit:
            figures |= releases(site.event_logs(), began)
        more = play.expect_fleet if replicas > 1 else play.expect_one
        expected = [*play.expect, *more, *(one for one in ALWAYS if one not in play.spare)]
        for complaint in complaints[:5]:
            sys.stdout.write(f"  logged: {complaint[:300]}\n")
        verdicts = [Expectation(text).judge(figures) for text in expected]
        if not is_off and not all(verdict.is_met for verdict in verdicts):
            sys.stdout.writelines(f"  {line[:300]}\n" for line in site.last_logged())
        return verdicts, result


def capacity(site: Site, play: Play, scenario: Scenario) -> float:
    """The requests a second that the site answers to clients of the first tenant that never wait."""
    name, first = next(iter(scenario.tenants.items()))
    clients = first.model_copy(
        update={"rate": None, "clients": CAPACITY_CLIENTS, "start": 0.0, "stop": None, "leave": 0.0}
    )
    course = {"tenants": {name: clients}, "seconds": play.capacity, "phases": {}, "drain": 0.001}
    answered = Benchmark(site.url, scenario.model_copy(update=course)).run().summary.all.answered
    return answered / play.capacity


def paced(scenario: Scenario, rate: float) -> Scenario:
    """The scenario with its rates, but not its clients, multiplied."""
    open_loops = {name: one.at_load(rate) for name, one in scenario.tenants.items() if one.rate is not None}
    return scenario.model_copy(update={"tenants": scenario.tenants | open_loops})


def releases(logs: Iterable[Path], began: float = 0.0) -> dict[str, float | None]:
    """The figures of a replay of event logs; without an ended sequence there are no `release.steps`. `computed`: the
    tokens of sequences that arrived since `began`.
    """
    found = [one for log in logs for one in released(read_event_log(log))]
    return {
        "release.steps": max((one.steps for one in found), default=None),
        "release.sequences": float(len(found)),
        "computed": float(sum(one.tokens for one in found if one.arrived >= began)),
    }


def _acts(faults: Mapping[str, str | list[str]]) -> Iterator[tuple[float, Act]]:
    for moment, said in faults.items():
        for text in [said] if isinstance(said, str) else said:
            yield units.positive_duration(moment), Act(text)


def _scenario(play: Play, site: Site) -> Scenario:
    tenants = {}
    for name, fields in play.traffic["tenants"].items():
        given = dict(fields)
        tenants[name] = {"model": MODEL, "key": site.keys[given.pop("tenant", name)], **given}
    return Scenario.parse({**play.traffic, "tenants": tenants}, "traffic")


def _figures(result: Result) -> Iterator[tuple[str, float | None]]:
    yield "recovery", result.summary.recovered_after
    yield "peak_in_flight", float(result.summary.peak_in_flight)
    yield "told", float(sum(one.told for one in result.settlements))
    yield "charged", float(sum(one.charged for one in result.settlements))
    yield "unsettled", float(sum(abs(one.charged - one.told) for one in result.settlements))
    yield from _of_summary("", result.summary)
    for phase, summary in result.phases.items():
        yield from _of_summary(f"{phase}.", summary)


def _of_summary(head: str, summary: Summary) -> Iterator[tuple[str, float | None]]:
    yield f"{head}gap_tokens", summary.gap_tokens
    for figures in (summary.all, *summary.tenants):
        for name, value in _of_figures(figures):
            yield f"{head}{figures.name}.{name}", value


def _of_figures(figures: Figures) -> Iterator[tuple[str, float | None]]:
    for name, value in asdict(figures).items():
        if isinstance(value, int | float) or value is None:
            yield name, value
    for name, latency in (
        ("ttft", figures.ttft),
        ("between", figures.between),
        ("per_token", figures.per_token),
        ("total", figures.total),
    ):
        yield from _of_latency(name, latency)
    yield "refused", float(sum(figures.refusals.values()))
    yield "failed", float(sum(figures.failures.values()))
    untyped = (number for code, number in figures.failures.items() if " " in code or code == TIMED_OUT)
    yield "failed_untyped", float(sum(untyped))
    for status in (429, 500, 502, 503, 504):
        refusals = [number for code, number in figures.refusals.items() if code.startswith(str(status))]
        yield f"refused_{status}", float(sum(refusals))
    yield "cached_share", figures.cached_tokens / figures.prompt_tokens if figures.prompt_tokens else None
    yield "right_share", figures.right / figures.judged if figures.judged else None
    yield "attempts", float(figures.offered + figures.retries)


def _of_latency(name: str, latency: Latency) -> Iterator[tuple[str, float | None]]:
    for what in ("mean", "p50", "p95", "p99"):
        yield f"{name}.{what}", getattr(latency, what)


if __name__ == "__main__":
    sys.exit(main())

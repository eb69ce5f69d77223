"""A bound on every order in `labs.benchmarks.overload`, and a look-ahead schedule that knows all arrivals: `python -m
labs.benchmarks.ceilings [--runs 3] [--seeds-from 101]`.

Both are figures of the same requests on the same machine.

The bound is arithmetic. A step has at most 512 tokens and a fixed part, so that each token takes at least a 512th of
the fixed part besides its own time. All good requests had their time within the run, except for tokens that may come
after it at 0.1 s each; so no order has more good requests than the best of them by value for time fill the run with
(the fractional knapsack of Dantzig, 1957). "Answers unknown" is the same for a policy that cannot know an answer's
length before its end: each request then takes, and is worth, the mean over all answers; it bounds means, not each run.

The look-ahead is a schedule that exists. It knows all arrivals and lengths from the start, and no tenants except the
light ones beside a flood, which come first. From the shortest prompt on it chooses each request that is still in time
together with all chosen before, earliest deadline first. The chosen alone are run through the simulated machine; a
request that is late there after all is left out, and the rest run again.
"""

import sys
from bisect import insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from statistics import mean

from admission.step_times.step_time import StepWork
from labs.benchmarks.overload import OURS
from labs.benchmarks.overload_loads import BESIDE_2X, DEVICE, FIRST_TOKEN, LIGHT, MIXED, OVERLOAD, Load, Traffic
from labs.benchmarks.overload_runs import PER_TOKEN_SECONDS, Run, simulate
from labs.benchmarks.report import Report, quantile, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.recorder import AttemptOutcome

STEP_TOKENS = 512  # tokens of a step, as `overload_loads.ENGINE` has it
FIXED_SECONDS_PER_TOKEN = DEVICE.seconds(StepWork()) / STEP_TOKENS  # seconds of each token, in steps that are full
EARLIEST = "order=earliest_deadline,overload=unbounded"
TIME_FACTORS = (0.96, 0.98, 1.0)  # multiples of the least times by which requests are chosen; the best counts
ANSWERS = 40  # quantiles of the answers, for unknown lengths
MAX_RERUNS = 2  # reruns without late requests
HORIZONS = (0.0, 4.0, 8.0)  # seconds after the last deadline for a first token, up to which time is counted


def least_seconds(arrival: Arrival) -> tuple[float, float]:
    """The least engine time of the prompt, and of the tokens after the first."""
    rates, prompt, more = DEVICE.rates, arrival.prompt_tokens, arrival.output_tokens - 1
    chunks = prompt // STEP_TOKENS
    behind = STEP_TOKENS * chunks * (chunks - 1) / 2  # tokens that chunks have before them
    context = more * prompt + more * (more + 1) / 2
    return (
        (FIXED_SECONDS_PER_TOKEN + rates.prefill) * prompt + rates.prefill_context * behind,
        (FIXED_SECONDS_PER_TOKEN + rates.decode) * more + rates.decode_context * context,
    )


# the bound


class Bound:
    """A bound on every order for these requests. If `answers` are given, an order does not know a request's answer
    length, which may be any of them; the bound is then one on means.
    """

    def __init__(self, arrivals: Sequence[Arrival], answers: Sequence[int] = ()) -> None:
        self._arrivals = arrivals
        last = max(map(_due, arrivals))
        self._ends = [last + more for more in HORIZONS]
        self._tokens, seconds = list[float](), list[list[float]]()
        for arrival in arrivals:
            alike = [arrival._replace(output_tokens=length) for length in answers] or [arrival]
            self._tokens.append(arrival.prompt_tokens + mean(one.output_tokens for one in alike))
            seconds.append([mean(_seconds_by(end, one) for one in alike) for end in self._ends])
        self._seconds = [list(column) for column in zip(*seconds, strict=True)]

    @property
    def good(self) -> float:
        """The share of good requests."""
        return self._filled([1.0] * len(self._arrivals)) / len(self._arrivals)

    @property
    def tokens(self) -> float:
        """The share of good tokens."""
        return self._filled(self._tokens) / sum(self._tokens)

    def _filled(self, values: Sequence[float]) -> float:
        """The largest total value of requests that fit the time together."""
        return min(_best(end, seconds, values) for end, seconds in zip(self._ends, self._seconds, strict=True))


def _seconds_by(end: float, arrival: Arrival) -> float:
    """The least engine time of a good request before `end`."""
    prompt, more = least_seconds(arrival)
    due = _due(arrival)
    part = max(0.0, min(1.0, (end - due) / (PER_TOKEN_SECONDS * max(1, arrival.output_tokens - 1))))
    return prompt + more * part * part  # later tokens take longer: the square is a lower bound


def _best(left: float, seconds: Sequence[float], values: Sequence[float]) -> float:
    worth = 0.0
    for each, value in sorted(zip(seconds, values, strict=True), key=lambda item: -item[1] / item[0]):
        part = min(1.0, left / each)
        if value <= 0 or part <= 0:
            break
        left, worth = left - part * each, worth + part * value
    return worth


# the look-ahead


class Chosen:
    """Requests that can all be in time on one machine."""

    def __init__(self) -> None:
        self._jobs: list[tuple[float, float, float]] = []  # arrival, seconds and deadline of each

    def add(self, came: float, seconds: float, due: float) -> bool:
        """Choose one more, if all can still be in time; returns whether they can."""
        job = came, seconds, due
        insort(self._jobs, job)
        if self._in_time(job):
            return True
        self._jobs.remove(job)
        return False

    def _in_time(self, job: tuple[float, float, float]) -> bool:
        """Serve the earliest deadline first, from when the machine was idle last before the job to when it is next."""
        jobs, first, until = self._jobs, 0, 0.0
        for number, (came, seconds, _) in enumerate(jobs):
            if came > until:
                if came > job[0]:
                    break
                first = number
            until = max(until, came) + seconds
        waiting: list[list[float]] = []
        now = jobs[first][0]
        for number in range(first, len(jobs) + 1):
            came = jobs[number][0] if number < len(jobs) else float("inf")
            while waiting and now < came:
                due, left = waiting[0]
                spent = min(left, came - now)
                now += spent
                if spent < left:
                    waiting[0][1] = left - spent
                    break
                if now > due:
                    return False
                heappop(waiting)
            if not waiting and came > job[0]:
                return True
            now = max(now, came)
            if number < len(jobs):
                heappush(waiting, [jobs[number][2], jobs[number][1]])
        return True


def look_ahead(arrivals: Sequence[Arrival], speed: float, first: Iterable[str] = ()) -> Run:
    """The run of the chosen requests; requests of the tenants `first` are chosen before all others."""
    before, chosen, taken = frozenset(first), Chosen(), list[Arrival]()
    for one in sorted(arrivals, key=lambda one: (one.tenant not in before, one.prompt_tokens)):
        if chosen.add(one.time, sum(least_seconds(one)) / speed, _due(one)):
            taken.append(one)
    run = simulate(EARLIEST, sorted(taken))
    for _ in range(MAX_RERUNS):
        taken = [one for one, outcome in run.outcomes if outcome is AttemptOutcome.GOOD]
        run = simulate(EARLIEST, taken)
    outcomes = {one.session: AttemptOutcome.REFUSED for one in arrivals} | dict(run.by_session)
    return Run(list(arrivals), outcomes, 1.0, [], {})


def _due(arrival: Arrival) -> float:
    return arrival.time + (arrival.deadline or FIRST_TOKEN)


# what is shown


def show(traffic: Traffic, load: Load, seeds: Sequence[int], shorter: float) -> dict[str, object]:
    """Returns the row of a load."""
    lengths = sorted(arrival.output_tokens for arrival in traffic.trace)
    answers = [quantile(lengths, (number + 0.5) / ANSWERS) for number in range(ANSWERS)]
    figures: dict[str, list[float]] = {}
    for seed in seeds:
        arrivals = load.shortened(shorter).arrivals(traffic, seed)
        known, unknown = Bound(arrivals), Bound(arrivals, [round(length) for length in answers])
        runs = [look_ahead(arrivals, speed, LIGHT) for speed in TIME_FACTORS]
        for what, value in (
            ("good, at most", known.good),
            ("good, answers unknown", unknown.good),
            ("good, look-ahead", max(run.good for run in runs)),
            ("good tokens, at most", known.tokens),
            ("good tokens, answers unknown", unknown.tokens),
            ("good, ours", simulate(OURS, arrivals).good),
        ):
            figures.setdefault(what, []).append(value)
    return {"load": load.name} | {what: mean(values) for what, values in figures.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seeds-from", type=int, default=101, metavar="N", help="the first seed")
    options = parser.parse_args(arguments)
    report = Report("ceilings", options.quick)
    seeds = range(options.seeds_from, options.seeds_from + (1 if options.quick else options.runs))
    report.notes.append(f"means over seeds {seeds.start} to {seeds.stop - 1}")
    for traffic in (Traffic.conversations(), Traffic.code()):
        rows = [show(traffic, load, seeds, 0.1 if options.quick else 1.0) for load in (OVERLOAD, MIXED, BESIDE_2X)]
        report.add_table(f"{traffic.name}: shares of what is offered", rows)
        for row in rows:
            most, ours = float(str(row["good, at most"])), float(str(row["good, ours"]))
            report.at_most(f"{traffic.name}, {row['load']}: good of ours, of the most", ours / most, 1.0)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())

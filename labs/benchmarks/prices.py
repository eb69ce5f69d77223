"""The charges of tenants beside the device time that they take: `python -m labs.benchmarks.prices`.

Equal tenants always have work waiting, and differ in the shape of their requests. Each has an equal share of the engine
time that it is charged, by prices that were fitted; this measures their shares of what the device really took. Of
simulated devices the truth is known: a step's time is divided by what each row adds to it, integrated while the step
grows from nothing to its size with all rows alike (Aumann and Shapley, 1974), and its fixed part by the same
proportions. So no row pays for another, however the device bends.

Each device varies by 2 % from step to step, and one step of five hundred stalls, in calibration too. Prices are fitted
to live steps alone, and with calibration steps before the first.
"""

import sys
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import NamedTuple, Protocol

from admission.step_times.idle_calibration import work_of_shape
from admission.step_times.step_calibration import Amounts
from admission.step_times.step_time import StepTime, StepWork
from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES, Device, Piece
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, PlannedWork, Recorder

SEEDS = 101  # the first; those below were looked at while the fit was made
REPEATS = 5  # of each calibration step
MIN_SHARE_OF_STEP = 0.2  # of some step's time, from which a coefficient is judged
NOISE, STALLS, STALL = 0.02, 0.002, 5.0
NAMES = ("fixed", "prefill", "decode", "decode context", "prefill context", "prefill pairs", "beyond the knee")


class Truth(Protocol):
    """A device with known true costs."""

    def seconds(self, amounts: Amounts) -> float: ...

    def rates(self, amounts: Amounts) -> tuple[float, ...]:
        """The marginal cost of each amount's unit, averaged while the step grows."""
        ...


@dataclass(frozen=True, slots=True)
class Hinged:
    """A device that turns compute-bound at a knee, without a jump: of the form that is fitted."""

    model: StepTime

    def seconds(self, amounts: Amounts) -> float:
        return self.model.seconds(StepWork(*amounts))

    def rates(self, amounts: Amounts) -> tuple[float, ...]:
        _, *rates, beyond = self.model.coefficients
        tokens = amounts[0] + amounts[1]
        each = beyond * max(0, tokens - self.model.knee) / max(1, tokens)
        return rates[0] + each, rates[1] + each, *rates[2:]


@dataclass(frozen=True, slots=True)
class Jumping:
    """A device of two pieces that do not meet at the knee, as Sarathi-Serve published one."""

    below: Piece
    above: Piece
    knee: int

    def seconds(self, amounts: Amounts) -> float:
        piece = self.below if amounts[0] + amounts[1] <= self.knee else self.above
        return piece.seconds(StepWork(*amounts))

    def rates(self, amounts: Amounts) -> tuple[float, ...]:
        tokens = amounts[0] + amounts[1]
        low = _rates(self.below)
        if tokens <= self.knee:
            return low
        share = self.knee / tokens
        there = StepWork(*[round(share * amount) for amount in amounts])
        jump = (self.above.seconds(there) - self.below.seconds(there)) / tokens
        mixed = [share * one + (1 - share) * other for one, other in zip(low, _rates(self.above), strict=True)]
        return mixed[0] + jump, mixed[1] + jump, *mixed[2:]


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device that reads memory and multiplies at a time, and takes as long as the longer, smoothly: of another form
    than any that is fitted.
    """

    launch: float  # seconds of every step
    reading: tuple[float, ...]  # seconds of every step, of a unit of each amount
    multiplying: tuple[float, ...]
    sharpness: float = 4.0

    def seconds(self, amounts: Amounts) -> float:
        return self.launch + self._norm(*self._both(amounts, 1.0))

    def rates(self, amounts: Amounts) -> tuple[float, ...]:
        total, points = [0.0] * 5, 8
        for point in range(points):
            reading, multiplying = self._both(amounts, (point + 0.5) / points)
            norm = self._norm(reading, multiplying)
            a, b = ((part / norm) ** (self.sharpness - 1) for part in (reading, multiplying))
            for place in range(5):
                total[place] += (a * self.reading[1 + place] + b * self.multiplying[1 + place]) / points
        return tuple(total)

    def _both(self, amounts: Amounts, share: float) -> tuple[float, float]:
        reading, multiplying = (
            rates[0] + share * sum(rate * amount for rate, amount in zip(rates[1:], amounts, strict=True))
            for rates in (self.reading, self.multiplying)
        )
        return reading, multiplying

    def _norm(self, a: float, b: float) -> float:
        return (a**self.sharpness + b**self.sharpness) ** (1 / self.sharpness)


def _rates(piece: Piece) -> tuple[float, ...]:
    return piece.prefill, piece.decode, piece.decode_context, piece.prefill_context, 0.0


_A100 = DEVICES["llama3-8b-a100"]
_BELOW = replace(_A100.rates)
_ABOVE = Piece(5.004e-3, 95.8e-6, -14.2e-6, 0.166e-6, 2.73e-6)


class Machine(NamedTuple):
    truth: Truth
    settings: str


MACHINES = {
    "Llama-3-8B, A100, 512 tokens": Machine(
        Jumping(_BELOW, _ABOVE, 512), "kv_tokens=100000,max_model_len=16384,max_num_seqs=128"
    ),
    "the same, 2,048 tokens": Machine(
        Jumping(_BELOW, _ABOVE, 512),
        "kv_tokens=200000,max_model_len=16384,max_num_seqs=192,max_num_batched_tokens=2048,prefill_chunk=1024",
    ),
    "hinged at 300 tokens": Machine(
        Hinged(StepTime((6e-3, 8e-6, 2e-5, 6e-8, 3e-7, 4e-9, 2.5e-5), 300)),
        "kv_tokens=200000,max_model_len=16384,max_num_seqs=192,max_num_batched_tokens=2048,prefill_chunk=1024",
    ),
    "roofline, 8B in 16 bits": Machine(
        Roofline(
            1.5e-3,
            (5e-3, 4e-8, 4e-8, 4e-8, 4e-8, 0.0),
            (2e-4, 2.4e-5, 2.4e-5, 1e-9, 1e-9, 8e-10),
        ),
        "kv_tokens=400000,max_model_len=16384,max_num_seqs=256,max_num_batched_tokens=2048,prefill_chunk=2048",
    ),
    "embedded, one core": Machine(
        Hinged(StepTime((8.4e-4, 6e-6, 2.8e-5, 4.5e-7, 6e-7, 1.5e-7, 3.2e-5), 24)),
        "kv_tokens=60000,max_model_len=8192,max_num_seqs=64,max_num_batched_tokens=512,prefill_chunk=512",
    ),
}


class Shape(NamedTuple):
    """The requests of one tenant: mean tokens."""

    name: str
    prompt: int
    output: int


AUTOCOMPLETE, CHAT = Shape("autocomplete", 40, 20), Shape("chat", 200, 100)
MIXES = {
    "four sizes": (AUTOCOMPLETE, CHAT, Shape("summaries", 700, 80), Shape("writing", 300, 400)),
    "extremes": (AUTOCOMPLETE, CHAT, Shape("long documents", 5000, 40), Shape("long answers", 120, 1200)),
    "prompts and answers": (Shape("prompts", 3000, 4), Shape("answers", 30, 800)),
}


class _TrueRecorder(Recorder):
    """Divides each step by the truth, and notes what each tenant has had as time goes on."""

    def __init__(self, device: Device, truth: Truth) -> None:
        super().__init__(device, Objective(), {})
        self._truth = truth
        self.course: list[tuple[float, list[float]]] = []  # busy seconds, and those of each tenant

    def _share(self, work: PlannedWork, elapsed: float) -> None:
        whole = StepWork()
        for of_tenant in work.by_tenant.values():
            whole += of_tenant
        rates = self._truth.rates(whole.amounts)
        parts = {
            tenant: sum(rate * amount for rate, amount in zip(rates, of_tenant.amounts, strict=True))
            for tenant, of_tenant in work.by_tenant.items()
        }
        total = sum(parts.values())
        for tenant, part in parts.items():
            self.tenants[tenant].seconds += elapsed * part / total
        self.course.append((self.busy, [tenant.seconds for tenant in self.tenants.values()]))


class Figures(NamedTuple):
    """The figures of one run, behind its first quarter, in which the first requests are admitted."""

    mispriced: float  # the most that a tenant was charged otherwise than the device took for it, as a share of that
    furthest: float  # the share of a tenant, relative to that of an equal one
    growth: float  # of the gap between two tenants, in seconds a second of engine time


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated, with all tenants' work waiting")
    parser.add_argument("--first-seed", type=int, default=SEEDS)
    options = parser.parse_args(arguments)
    runs, seconds = (1, 5.0) if options.quick else (options.runs, options.seconds)
    seeds = range(options.first_seed, options.first_seed + runs)
    report = Report("prices", options.quick)
    _recover(report, seeds)
    rows: list[dict[str, object]] = []
    for name, machine in MACHINES.items():
        for mix, shapes in MIXES.items():
            before = [_run(machine, shapes, seeds[0], seconds, is_calibrated=False)]
            after = [_run(machine, shapes, seed, seconds, is_calibrated=True) for seed in seeds]
            rows.append({"device": name, "tenants": mix} | _row(before, after))
            if not isinstance(machine.truth, Roofline) and "same" not in name:
                _judge(report, f"{name}, {mix}", after)
    report.add_table("equal tenants: live steps alone (one run) -> calibrated, median (extremes)", rows)
    report.notes = ["targets are of devices of the form that is fitted; the others are shown"]
    return report.finish(options.results)


def _row(before: list[Figures], after: list[Figures]) -> dict[str, object]:
    return {
        "mispriced": _arrow([one.mispriced for one in before], [one.mispriced for one in after]),
        "furthest from its share": _arrow([one.furthest for one in before], [one.furthest for one in after]),
        "growth of the gap": _arrow([one.growth for one in before], [one.growth for one in after]),
    }


def _arrow(before: list[float], after: list[float]) -> str:
    return f"{Spread.of(before)} -> {Spread.of(after)}"


def _judge(report: Report, what: str, after: list[Figures]) -> None:
    report.at_most(f"{what}: mispriced, mean", sum(f.mispriced for f in after) / len(after), 0.02)
    report.at_most(f"{what}: furthest from an equal share, mean", sum(f.furthest for f in after) / len(after), 0.02)
    report.at_most(f"{what}: growth of the gap, mean", sum(f.growth for f in after) / len(after), 0.01)


# coefficients


def _recover(report: Report, seeds: range) -> None:
    """Report the error of each coefficient before the first request, on devices of the form that is fitted."""
    rows: list[dict[str, object]] = []
    for name, machine in MACHINES.items():
        truth = machine.truth
        policy = parse_simulated_policy(machine.settings, _A100)
        if isinstance(truth, Jumping) and policy.engine.max_num_batched_tokens <= truth.knee:
            true = (truth.below.fixed, *_rates(truth.below), 0.0)
        elif isinstance(truth, Hinged):
            true = truth.model.coefficients
        else:
            continue
        found: list[list[float]] = [[] for _ in true]
        for seed in seeds:
            core = policy.make_core()
            core.calibrated(_calibration(policy.engine, _Noisy(truth, Random(seed))), 0.0)
            for errors, coefficient, one in zip(found, core.step_time.fitted.coefficients, true, strict=True):
                errors.append(coefficient / one - 1 if one else coefficient)
        works = [work_of_shape(step) for series in calibration_series(policy.engine) for step in series]
        shown = [
            max(one * amount for amount in _column(place, works, truth)) >= MIN_SHARE_OF_STEP
            for place, one in enumerate(true)
        ]
        each = {what: Spread.of(errors) for what, errors, seen in zip(NAMES, found, shown, strict=True) if seen}
        rows.append({"device": name} | {what: each.get(what, "-") for what in NAMES})
        worst = max(max(abs(spread.low), abs(spread.high)) for spread in each.values())
        report.at_most(f"{name}: coefficients after calibration, worst error of any", worst, 0.05)
    report.add_table("relative errors of coefficients after calibration", rows)


def _column(place: int, works: list[StepWork], truth: Truth) -> list[float]:
    """The factor of one coefficient in each step, by the time of the step."""
    knee = truth.model.knee if isinstance(truth, Hinged) else inf
    each = [(1, *work.amounts, max(0, work.prefill_tokens + work.decode_tokens - knee)) for work in works]
    return [factors[place] / truth.seconds(work.amounts) for factors, work in zip(each, works, strict=True)]


# shares


class _Noisy:
    """Step times with variation and stalls."""

    def __init__(self, truth: Truth, random: Random) -> None:
        self._truth, self._random = truth, random

    def seconds(self, work: StepWork) -> float:
        stall = STALL if self._random.random() < STALLS else 1.0
        return self._truth.seconds(work.amounts) * self._random.gauss(1, NOISE) * stall


def _calibration(engine: EngineConfig, noisy: _Noisy) -> list[tuple[CalibrationStep, float]]:
    steps = [step for series in calibration_series(engine) for step in series]
    return [(step, noisy.seconds(work_of_shape(step))) for step in steps for _ in range(REPEATS)]


def _run(machine: Machine, shapes: tuple[Shape, ...], seed: int, seconds: float, is_calibrated: bool) -> Figures:
    random = Random(seed)
    noisy = _Noisy(machine.truth, random)
    device = Device("true", noisy.seconds, _BELOW, 0)
    settings = f"max_waiting=1000000,calibration=off,{machine.settings}"
    policy = parse_simulated_policy(settings, replace(_A100, seconds=noisy.seconds))
    core = policy.make_core()
    if is_calibrated:
        core.calibrated(_calibration(policy.engine, noisy), 0.0)
    recorder = _TrueRecorder(device, machine.truth)
    loop = Loop(core, device, recorder, policy.engine.max_model_len)
    loop.expect(_arrivals(machine.truth, shapes, random, seconds))
    loop.advance(seconds / 4)
    charged = {tenant: account.charged for tenant, account in core.share.accounts.items()}
    served = {tenant.name: tenant.seconds for tenant in recorder.tenants.values()}
    first = len(recorder.course)
    loop.advance(seconds)
    assert all(tenant.waiting for tenant in recorder.tenants.values()), "a tenant ran out of work"
    took = {tenant.name: tenant.seconds - served[tenant.name] for tenant in recorder.tenants.values()}
    fair = sum(took.values()) / len(took)
    paid = {tenant: account.charged - charged[tenant] for tenant, account in core.share.accounts.items()}
    return Figures(
        max(abs(paid[tenant] / seconds - 1) for tenant, seconds in took.items()),
        max(abs(seconds / fair - 1) for seconds in took.values()),
        _growth(recorder.course[first:]),
    )


def _growth(course: list[tuple[float, list[float]]]) -> float:
    """The slope of the line through the difference of two tenants over busy time, of the pair that drifts most."""
    busy = [at for at, _ in course]
    middle = sum(busy) / len(busy)
    square = sum((at - middle) ** 2 for at in busy)
    slopes = [
        sum((at - middle) * value for at, value in zip(busy, column, strict=True)) / square
        for column in zip(*[seconds for _, seconds in course], strict=True)
    ]
    return max(slopes) - min(slopes)


def _arrivals(truth: Truth, shapes: tuple[Shape, ...], random: Random, seconds: float) -> list[Arrival]:
    """All at once, and more of each than it can have served: at the least, a request takes its part of full steps."""
    made = []
    for shape in shapes:
        rates = truth.rates((256, 64, 64 * 500, 500, 256 * 500))
        context = shape.prompt + shape.output / 2
        least = rates[0] * shape.prompt + (rates[1] + rates[2] * context) * shape.output
        count = int(1.5 * seconds / len(shapes) / max(least, 1e-5)) + 300
        for _ in range(count):
            prompt, output = (max(1, int(mean * random.uniform(0.5, 1.5))) for mean in shape[1:])
            made.append(Arrival(0.0, prompt, output, tenant=shape.name, patience=inf))
    random.shuffle(made)
    return made


if __name__ == "__main__":
    sys.exit(main())

"""The true costs of tenants on the simulated device, by its own coefficients instead of the fitted ones.

The true cost of a row is its part of the time that its step took, with the fixed part of the step divided as the
marginal costs of its rows are. A ledger that divides steps by wrong coefficients is fair by its own account only: each
step is predicted well, and still charged to the wrong tenants.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from labs.benchmarks.report import Report, Spread
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder

DEVICE = DEVICES["llama3-8b-a100"]
SLOTS = 192
POLICY = f"order=fair,overload=unbounded,max_num_batched_tokens=512,max_num_seqs={SLOTS},prefill_chunk=512"
MOMENTS = (40.0, 60.0, 150.0, 300.0)  # seconds
AMPLE = 3.0  # of a tenant's share without fixed parts of steps, waiting from the start


class Mix(NamedTuple):
    """A tenant's requests, by the mean tokens of their prompts and their answers."""

    name: str
    prompt: int
    output: int

    @property
    def seconds(self) -> float:
        """The seconds of a mean request, without the fixed part of steps."""
        rates = DEVICE.rates
        return rates.prefill * self.prompt + self.output * (rates.decode + rates.decode_context * self.prompt)

    def requests(self, random: Random, seconds: float) -> list[Arrival]:
        """Return more requests than would fill `seconds` of the device, all there from the start."""
        return [self.request(random) for _ in range(SLOTS + round(AMPLE * seconds / self.seconds))]

    def request(self, random: Random) -> Arrival:
        prompt, output = (max(1, round(mean * random.uniform(0.5, 1.5))) for mean in (self.prompt, self.output))
        return Arrival(0.0, prompt, output, tenant=self.name, max_tokens=2048)


QUESTIONS, ANSWERS = Mix("short questions", 100, 50), Mix("long answers", 200, 900)
DOCUMENTS, BOOKS = Mix("documents", 6000, 80), Mix("books", 12_000, 20)
TALKS, CHAT = Mix("long talks", 4000, 500), Mix("chat", 1000, 200)
CODE, WORDS = Mix("code", 2000, 30), Mix("autocomplete", 40, 20)
GROUPS = (
    (QUESTIONS, DOCUMENTS, ANSWERS, TALKS),
    (QUESTIONS, ANSWERS, WORDS, CHAT),
    (CHAT, CODE, DOCUMENTS, BOOKS),
    (TALKS, BOOKS),
)
"""Equal tenants beside each other."""


def show_shares(report: Report, seeds: Sequence[int], moments: Sequence[float]) -> None:
    """Shows what tenants of equal weight get by the ledger and in truth, and how the gap grows."""
    found = {group: [_run(group, seed, moments) for seed in seeds] for group in GROUPS}
    rows: list[Row] = [
        {
            "tenant": mix.name,
            "fair": 1 / len(group),
            "by the ledger": Spread.of([ledger[mix.name] for ledger, _, _ in runs]),
            "in truth": Spread.of([true[mix.name] for _, true, _ in runs]),
        }
        for group, runs in found.items()
        for mix in group
    ]
    report.add_table(f"equal tenants with different requests, all always waiting: shares of {moments[-1]:g} s", rows)
    gaps: list[Row] = [
        {"tenants": ", ".join(mix.name for mix in group)}
        | {f"{moment:g} s": Spread.of([gaps[n] for _, _, gaps in runs]) for n, moment in enumerate(moments)}
        for group, runs in found.items()
    ]
    report.add_table("the largest gap in true engine time, seconds, by the time since the start", gaps)
    every = [run for runs in found.values() for run in runs]
    worst = max(abs(share * len(true) - 1) for _, true, _ in every for share in true.values())
    report.at_most("true share of an equal tenant, off a fair one by, worst tenant and seed", worst, 0.02)
    since, until = moments[-2:]  # a gap within its bound builds up for as long as the longest answers take
    growth = max((gaps[-1] - gaps[-2]) / (until - since) for _, _, gaps in every)
    report.at_most(f"growth of the gap in true engine time after {since:g} s, share of the time", growth, 0.01)


Row = dict[str, object]
_Found = tuple[dict[str, float], dict[str, float], list[float]]  # shares by the ledger, true ones, gaps at the moments


def _run(group: Sequence[Mix], seed: int, moments: Sequence[float]) -> _Found:
    random = Random(seed)
    requests = [one for mix in group for one in mix.requests(random, moments[-1] / len(group))]
    random.shuffle(requests)
    simulated = parse_simulated_policy(POLICY, DEVICE)
    core, recorder = simulated.make_core(), Recorder(DEVICE, Objective(), {})
    loop, gaps = Loop(core, DEVICE, recorder, simulated.engine.max_model_len), []
    loop.expect(requests)
    for moment in moments:
        loop.advance(moment)
        gaps.append(recorder.gap_seconds.largest)
    idle = [name for name, tenant in recorder.tenants.items() if not tenant.waiting]
    assert not idle, f"{idle} had too little to do"
    charged = {name: account.charged for name, account in core.share.accounts.items()}
    return shares(charged), shares({name: tenant.seconds for name, tenant in recorder.tenants.items()}), gaps


def shares(amounts: dict[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: amount / total for name, amount in amounts.items()}

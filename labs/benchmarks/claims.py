"""The claim of each published scheduler, the words of its source, and the measurement here: `python -m
labs.benchmarks.claims`.

Writes `docs/claims.md`: a row for each claim in circulation, with its source, what that really says, the figure of the
simulated machine (Llama-3-8B on an A100, published step times; lengths drawn from quantiles of Azure's traces), a live
one where another benchmark has measured it, and why they differ. Settings are in `labs.benchmarks.claim_measures`, one
function each. A figure counts as reproduced where it is within a factor of two of what the source says in a setting
like its own; what does not reproduce is said plainly.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from labs.benchmarks import claim_choices
from labs.benchmarks import claim_measures as measures
from labs.benchmarks.claim_measures import MEGABYTES, Measured, decodes_of_prefill
from labs.benchmarks.report import RESULTS, Report, scenario_parser


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the ledger."""

    what: str
    source: str
    says: str
    claimed: tuple[float, float] | None  # the least and the most that is claimed; None: the source has no figure
    measure: Callable[[int, float], Measured]  # by a seed, and a share of the requests
    differs: str
    live: tuple[str, str, str] | None = None  # a result of another benchmark: scenario, target, and how it reads

    def reproduces(self, measured: Measured) -> bool:
        """Returns True where the figure is within a factor of two of what is claimed."""
        return self.claimed is not None and self.claimed[0] / 2 <= measured.figure <= 2 * self.claimed[1]


def _known(figure: float, text: str) -> Callable[[int, float], Measured]:
    return lambda *_: Measured(figure, text)


ROWS = (
    Claim(
        "Continuous batching is 3 to 5x as fast as static",
        "guides; Orca (Yu et al., OSDI 2022)",
        "36.9x FasterTransformer at 175B and equal latency",
        (3.0, 5.0),
        measures.static_to_continuous,
        "Orca's figure is throughput at one latency, which a static batch cannot have",
        ("engine_peers", "float32: continuous over static batches of 8, varied lengths", "{:.1f}x packed batches of 8"),
    ),
    Claim(
        "+212 % throughput with -60 % p99, by batching continuously",
        "guides",
        "no source",
        (2.12, 2.12),
        measures.continuous_tail,
        "by how static the other is: what is padded loses most",
    ),
    Claim(
        "4 to 20x, by the variance of lengths",
        "guides",
        "no source",
        (4.0, 20.0),
        measures.length_variance,
        "20x takes answers more unlike each other than any trace's",
    ),
    Claim(
        "60 to 70 % of a static batch is padding",
        "guides",
        "no source",
        (0.6, 0.7),
        measures.padding_waste,
        "grouping prompts by length nearly halves it; what is left is answers that differ",
    ),
    Claim(
        "Chunked prefill keeps tokens coming, for < 5 % of throughput",
        "Sarathi-Serve (Agrawal et al., OSDI 2024)",
        "2.6x capacity for Mistral-7B, 3.7x for Yi-34B, 5.6x for Falcon-180B",
        (2.6, 5.6),
        measures.chunked_prefill,
        "by the tail of 0.1 s alone; the source bounds the wait for a slot as well",
    ),
    Claim(
        "PagedAttention is 24x as fast",
        "vLLM (Kwon et al., SOSP 2023)",
        "2 to 4x FasterTransformer and Orca",
        (2.0, 4.0),
        measures.paging,
        "the device here is faster for its memory than the paper's; 24x was over Hugging Face",
    ),
    Claim(
        "Learning to rank: +23.7 % throughput",
        "vllm-ltr (Fu et al., NeurIPS 2024)",
        "not in the paper: 2.8x lower chat latency",
        (2.8, 2.8),
        measures.learned_rank,
        "the paper pauses long answers that run; here who was admitted goes on",
    ),
    Claim(
        "Learning to rank: 6.5x in synthetic data generation",
        "vllm-ltr",
        "6.5x, the first 1,000 of 10,000 prompts",
        (6.5, 6.5),
        measures.learned_rank_offline,
        "the first tenth of 6,000, by a predictor that learns meanwhile",
    ),
    Claim(
        "SLAI: -53 % median time to first token",
        "Bari et al., 2025",
        "-53 %, Mistral-7B on an RTX ADA 6000",
        (0.53, 0.53),
        measures.slai,
        "its -34 % p99, as it circulates, has no source",
    ),
    Claim(
        "SLAI: +26 % capacity",
        "Bari et al., 2025",
        "+26 % with a median below 0.5 s",
        (0.26, 0.26),
        measures.slai_capacity,
        "capacity by the same rule, in steps of 5 %",
    ),
    Claim(
        "Magnus: +234 % throughput",
        "Cheng et al., 2024",
        "+66 to 234 %, and -60 to 89.7 % response time, over padded batches of a fixed size",
        (0.66, 2.34),
        measures.magnus,
        "and continuous batching leaves both behind; the -22.8 % that circulates is of another setting",
    ),
    Claim(
        "WAIT: 20 to 30 % more throughput near overload",
        "Ao et al., 2025",
        "version 2: more throughput and less latency than vLLM and Sarathi, no figure",
        None,
        measures.wait,
        "thresholds are 1 to 3 at a few arrivals a second: what helps is that memory lasts",
    ),
    Claim(
        "Multi-level feedback: 5.1x sooner on average",
        "FastServe (Wu et al., 2023)",
        "up to 5.1x the average completion of Orca, on synthetic skew",
        (5.1, 5.1),
        measures.multilevel_feedback,
        "a row more costs a step little: where memory is there, more rows do what the levels were for, and more",
    ),
    Claim(
        "Dynamic batching by a window raises throughput for a little delay",
        "Triton Inference Server",
        "depends on the model; no figure",
        None,
        measures.window,
        "steps that are under way gather newcomers anyway: what a window saves is idle steps",
    ),
    Claim(
        "Forecast admission preempts a third as often",
        "Past-Future (Gong et al., 2025)",
        "fewer evictions at the same throughput",
        (0.4, 0.4),
        measures.forecast_admission,
        "ours risks more, since what is preempted is found again",
    ),
    Claim(
        "A virtual token counter bounds the gap between tenants; request round robin does not",
        "VTC (Sheng et al., OSDI 2024)",
        "a bound of twice the batch's tokens",
        None,
        measures.service_gaps,
        "deficit round robin keeps it as small",
    ),
    Claim(
        "Least laxity first is optimal, as earliest deadline first is",
        "Dertouzos and Mok, 1989",
        "of one processor, with preemption, where all can be in time",
        None,
        measures.least_laxity,
        "not all can be in time, and who began goes on; deadlines of 0.7, 2 and 8 s at 1.4 times capacity",
    ),
    Claim(
        "Highest response ratio next serves the short early and starves nobody",
        "Brinch Hansen, 1971; Magnus",
        "no figure of its own",
        None,
        measures.response_ratio,
        "blind to tenants, where fair is not; 27 tenants, 64 slots",
    ),
    Claim(
        "Boost who waits after 200 to 500 ms",
        "tutorials",
        "vllm-ltr promotes after 200 steps, FastServe after 3 s",
        None,
        measures.starvation_boost,
        "the sketched rule turns around after 3.3 times its seconds",
    ),
    Claim(
        "Speculation by goodput: 3.2x lower latency",
        "SmartSpec (Liu et al., 2024)",
        "up to 3.2x, and never slower than none where a fixed length is",
        (3.2, 3.2),
        measures.speculation,
        "acceptance is a parameter here: 70 %, and 30 % at high load",
    ),
    Claim(
        "Prefill and decode on devices of their own: 7.4x the requests",
        "DistServe (Zhong et al., OSDI 2024)",
        "2.0 to 4.6x the requests for chats, up to 7.4x, beside vLLM of its day",
        (2.0, 7.4),
        measures.disaggregation,
        "at 25 ms a token; at 40 ms all together serve as much: `sluice pools` says when it pays",
    ),
    Claim(
        "Phases apart: 1.4x the throughput at less cost",
        "Splitwise (Patel et al., ISCA 2024)",
        "1.4x the requests at 20 % less cost, 2.35x at the same cost and power, of other GPUs for tokens",
        (1.4, 1.4),
        measures.phase_splitting,
        "one kind of GPU, beside chunks, which its baseline has not; the traffic is of its own traces",
    ),
    Claim(
        "Admission by deadline keeps goodput in overload",
        "our reference simulation",
        "85 % at 1.4 times load, 1 % unbounded",
        (0.85, 0.85),
        measures.deadline_admission,
        "other loads and lengths",
    ),
    Claim(
        "CoDel with adaptive LIFO does nearly as well",
        "Maurer, 2015; our reference simulation",
        "71 %",
        (0.71, 0.71),
        measures.controlled_delay,
        "it gives up what has waited, and refuses nobody at once",
    ),
    Claim(
        "A prefill of 4,096 tokens costs 4,096 decode steps",
        "guides",
        "no source; about 27",
        (27.0, 27.0),
        _known(decodes_of_prefill(), f"{decodes_of_prefill():.0f} decode steps"),
        "the published step times",
    ),
    Claim(
        "Swapping a gigabyte takes 2 ms",
        "guides",
        "no source; 40 ms",
        (40.0, 40.0),
        _known(1000 / 25, "40 ms at 25 GB/s, what a PCIe 4 link of 16 lanes copies"),
        "arithmetic",
    ),
    Claim(
        "1,000 tokens of KV of a 70B model are 4 GB, 0.3 s at 100 Gb/s",
        "guides",
        "no source; 335 MB, 27 ms",
        (335.0, 335.0),
        _known(MEGABYTES, f"{MEGABYTES:.0f} MB, and {MEGABYTES * 8 / 1e5 * 1e3:.0f} ms at 100 Gb/s"),
        "arithmetic: 8 KV heads, not 64",
    ),
)
PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
HEAD = """\
# What schedulers claim, and what we measure

Written by `python -m labs.benchmarks.claims` (seed {seed}, {minutes:.0f} minutes), not by hand. The machine is
simulated: Llama-3-8B on an A100 with the step times that Sarathi-Serve publishes, and lengths drawn from quantiles of
Azure's traces of 2023. Each figure is a ratio of two runs on the same requests. A claim reproduces where the figure is
within a factor of two of its source's; `labs/benchmarks/claim_measures.py` has each setting.

## Claims

| claim in circulation | source | what the source says | simulated here | live here | reproduces | why they differ |
|---|---|---|---|---|---|---|
"""


BESIDE = """
## Each choice beside the default

Four tenants at 1.4 times capacity, of whom the first asks for three times as much as each of the others; a first
token is wanted within two seconds, then a token every 0.1 s on average. All have the default's admission by deadline,
which none of their sources has. Three figures on three kinds of traffic: the share of all requests that are good; that
of the worst of the three light tenants; and the largest gap between what two tenants were served while both had work
waiting, in seconds of the device.

"""


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--seed", type=int, default=301, help="of the requests (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the file to write (default: docs/claims.md)")
    options = parser.parse_args(arguments)
    report, began = Report("claims", options.quick), time.perf_counter()
    found = [(claim, _measured(claim, options.seed, options.quick)) for claim in ROWS]
    choices = claim_choices.beside(options.seed, 0.1 if options.quick else 1.0)
    judged = [claim.reproduces(measured) for claim, measured in found if claim.claimed is not None]
    report.add_table("claims", [_row(claim, measured) for claim, measured in found])
    for kind in claim_choices.TRAFFIC:
        figures = [{"choice": choice, **asdict(by_kind[kind])} for choice, by_kind in choices.items()]
        report.add_table(f"each choice beside the default: {kind}", figures)
    report.at_least("claims with a figure that reproduce", sum(judged) / len(judged), 0.75)
    if not options.quick:
        minutes = (time.perf_counter() - began) / 60
        head = HEAD.format(seed=options.seed, minutes=minutes)
        options.page.write_text(head + "".join([*_lines(found), BESIDE, *claim_choices.lines(choices)]))
    return report.finish(options.results)


def _measured(claim: Claim, seed: int, is_quick: bool) -> Measured:
    print(f"{claim.what} …", file=sys.stderr, flush=True)
    return claim.measure(seed, 0.1 if is_quick else 1.0)


def _row(claim: Claim, measured: Measured) -> dict[str, object]:
    return {"claim": claim.what, "claimed": _range(claim.claimed), "measured": measured.figure, "says": measured.text}


def _range(claimed: tuple[float, float] | None) -> str:
    return "-" if claimed is None else " to ".join(f"{figure:g}" for figure in dict.fromkeys(claimed))


def _lines(found: list[tuple[Claim, Measured]]) -> Iterator[str]:
    for claim, measured in found:
        verdict = "-" if claim.claimed is None else "yes" if claim.reproduces(measured) else "no"
        cells = (claim.what, claim.source, claim.says, measured.text, _live(claim), verdict, claim.differs)
        yield f"| {' | '.join(cells)} |\n"


def _live(claim: Claim) -> str:
    """Returns what another benchmark has measured live."""
    if claim.live is None:
        return "-"
    scenario, what, text = claim.live
    targets = json.loads((RESULTS / f"{scenario}.json").read_text())["targets"]
    value = next(target["value"] for target in targets if target["what"] == what)
    return text.format(value)


if __name__ == "__main__":
    sys.exit(main())

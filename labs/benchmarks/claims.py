"""The claims in circulation about schedulers, the words of their sources, and the measurement here: `python -m
labs.benchmarks.claims [--all]`.

Writes `results/claims.json` and from it `docs/claims.md`. A row is judged by the figures that its first column names,
over three seeds: **yes** where each seed is within a fifth of them, **partly** where the median is within a factor of
two or one of two figures holds, else **no**; **another claim** where the words that circulate say of their source what
it does not. A figure beside which stands a bound holds on one side.

A measurement is repeated only if its short form has changed, in which everything is a twentieth as long: most commits
that would change the page change it, and a test fails. `--all` repeats all.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import isinf
from pathlib import Path
from typing import Any

from labs.benchmarks import claim_choices
from labs.benchmarks.claim_measures import Figures
from labs.benchmarks.claim_rows import ROWS, Claim
from labs.benchmarks.report import RESULTS, Report, Spread, format_number, scenario_parser
from labs.process_pool import process_pool

FIRST_SEED = 301
SHORT_SHARE = 0.05  # of the requests or the seconds
LEAST_LIVE_ROWS = 3
YES_SHARE, PARTLY_RATIO = 0.2, 2.0  # of a claimed figure
PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
SHORTENED = """\
**Shortened, so that no row is judged**: with {share:.0%} of the requests and seconds of a full run. Queues and batches
begin and end in it, so that overload shows less, and batches are emptier: several figures are far from those of a full
run, which `python -m labs.benchmarks.claims` makes.

"""
Measured = Mapping[str, Spread]  # by figure
HEAD = """\
# What schedulers claim, and what we measure

{cut}Written by `python -m labs.benchmarks.claims` over seeds {seeds}, the median before its extremes. The machine
is simulated: Llama-3-8B on an A100 with the step times that Sarathi-Serve publishes, and lengths drawn from quantiles
of Azure's traces of 2023. Batches and memory are measured with the default's order, `fair`, unless the row is of an
order; `labs/benchmarks/claim_measures.py` has each setting.

A row is judged by the figures in bold, those that its first column names. **yes**: each seed is within a fifth of the
claim. **partly**: the median is within a factor of two, or one of two figures holds. **no**: neither. **another
claim**: the source says something else than what circulates. A bound, such as below 5 %, is met by each seed, by some
(partly) or by none.

## Claims

| claim in circulation | source | what the source says | measured, simulated | live | verdict | why they differ |
|---|---|---|---|---|---|---|
"""
BESIDE = """
## Each choice beside the default

Four tenants at 1.4 times capacity, of whom the first asks for three times as much as each of the others; a first
token is wanted within two seconds, then a token every 0.1 s on average. All have the default's admission by deadline,
which none of their sources has. Three figures on four kinds of traffic, medians over the seeds: the share of all
requests that are good; that of the worst of the three light tenants; and the largest gap between what two tenants were
served while both had work waiting, in seconds of the device. Memory is scarce in the last kind: conversations in 24,000
tokens.

"""


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--all", action="store_true", help="repeat measurements whose short form is as before, too")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests and seconds (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    report = Report("claims", options.quick)
    seeds = [FIRST_SEED] if options.quick else [*range(FIRST_SEED, FIRST_SEED + options.runs)]
    once = measured(measures(), [FIRST_SEED], SHORT_SHARE, options.jobs)
    short = {name: own[0] for name, own in once.items()}
    kept = {} if options.all or options.quick else recorded(options.results, short, len(seeds), options.share)
    share = SHORT_SHARE if options.quick else options.share
    fresh = once if options.quick else measured(measures().keys() - kept.keys(), seeds, share, options.jobs)
    found = kept | {
        name: {figure: Spread.of([each[figure] for each in own]) for figure in own[0]} for name, own in fresh.items()
    }
    report.add_table("measured", [row | {"share": share} for row in _rows(found, "measured")])
    report.add_table("short form", [*_rows(short, "value")])
    if share == 1:
        report.add_table("verdicts", _counted(verdict(claim, found | live(claim)) for claim in ROWS))
    report.at_least("rows that are live", sum(claim.live is not None for claim in ROWS), LEAST_LIVE_ROWS)
    status = report.finish(options.results)
    if not options.quick and options.results == RESULTS:
        PAGE.write_text(page(options.results))
        print("run python -m labs.benchmarks.performance_page as well")
    return status


def measures() -> dict[str, Callable[[int, float], Figures]]:
    """Returns each measurement by its name; one may serve several rows."""
    of_rows = {claim.measure.__name__: claim.measure for claim in ROWS if claim.measure is not None}
    return of_rows | {
        choice: partial(claim_choices.measure, policy) for choice, policy in claim_choices.choices().items()
    }


def measured(names: Iterable[str], seeds: list[int], share: float, jobs: int) -> dict[str, list[Figures]]:
    """Returns the figures of each measurement, by seed."""
    tasks = [(name, seed) for name in measures() if name in set(names) for seed in seeds]
    found = dict[str, list[Figures]]()
    with process_pool(jobs) as pool:
        for (name, _), figures in zip(tasks, pool.map(partial(_one, share), tasks), strict=True):
            print(f"{name} …", file=sys.stderr, flush=True)
            found.setdefault(name, []).append(figures)
    return found


def _one(share: float, task: tuple[str, int]) -> Figures:
    name, seed = task
    return measures()[name](seed, share)


def recorded(results: Path, short: Mapping[str, Figures], seeds: int, share: float) -> dict[str, Measured]:
    """Returns what was measured over as many seeds and requests, and has this short form."""
    path = results / "claims.json"
    tables = json.loads(path.read_text())["tables"] if path.exists() else {}
    before = short_form(tables)
    if any(row.get("share") != share for row in tables.get("measured", ())):
        return {}
    return {
        name: figures
        for name, figures in full_form(tables).items()
        if before.get(name) == short.get(name) and all(spread.runs == seeds for spread in figures.values())
    }


def full_form(tables: Mapping[str, Any]) -> dict[str, dict[str, Spread]]:
    """Returns the recorded figures of each measurement."""
    found = dict[str, dict[str, Spread]]()
    for row in tables.get("measured", ()):
        found.setdefault(row["measure"], {})[row["figure"]] = Spread(**row["measured"])
    return found


def short_form(tables: Mapping[str, Any]) -> dict[str, Figures]:
    """Returns the recorded short form of each measurement."""
    found = dict[str, Figures]()
    for row in tables.get("short form", ()):
        found.setdefault(row["measure"], {})[row["figure"]] = row["value"]
    return found


def _rows(found: Mapping[str, Mapping[str, object]], column: str) -> Iterator[dict[str, object]]:
    for name in measures():
        for figure, value in found[name].items():
            yield {"measure": name, "figure": figure, column: value}


def live(claim: Claim) -> dict[str, Measured]:
    """Returns the figure of another benchmark on a live server or engine, under the name `live`."""
    if claim.live is None:
        return {}
    targets = json.loads((RESULTS / f"{claim.live.scenario}.json").read_text())["targets"]
    value = claim.live.factor * next(each["value"] for each in targets if each["what"] == claim.live.target)
    return {"live": {claim.live.figure: Spread.of([value])}}


def verdict(claim: Claim, found: Mapping[str, Measured]) -> str:
    """Judges a row by the figures that it claims."""
    if claim.is_another:
        return "another claim"
    own = _own(claim, found)
    said = {judged(bounds, own[figure]) for figure, bounds in claim.claimed.items()}
    if len(said) == 1:
        return said.pop()
    return "partly" if "yes" in said else "no"


def judged(claimed: tuple[float, float], spread: Spread) -> str:
    """Judges a figure by the least and the most that is claimed of it; an infinite one makes the other a bound."""
    if any(map(isinf, claimed)):
        holds = {claimed[0] <= value <= claimed[1] for value in (spread.low, spread.high)}
        return "partly" if len(holds) == 2 else "yes" if True in holds else "no"
    low, high = sorted(abs(bound) for bound in claimed)
    sign = -1 if claimed[1] < 0 else 1
    seeds = [sign * value for value in (spread.low, spread.high)]
    if all(low * (1 - YES_SHARE) <= value <= high * (1 + YES_SHARE) for value in seeds):
        return "yes"
    return "partly" if low / PARTLY_RATIO <= sign * spread.median <= high * PARTLY_RATIO else "no"


def page(results: Path = RESULTS) -> str:
    """Returns the page's Markdown."""
    tables = json.loads((results / "claims.json").read_text())["tables"]
    found, share = full_form(tables), tables["measured"][0]["share"]
    runs = max(spread.runs for figures in found.values() for spread in figures.values())
    cut = "" if share == 1 else SHORTENED.format(share=share)
    head = HEAD.format(seeds=f"{FIRST_SEED} to {FIRST_SEED + runs - 1}", cut=cut)
    choices = {choice: found[choice] for choice in claim_choices.choices()}
    return head + "".join([*_lines(found, share == 1), BESIDE, *claim_choices.lines(choices)])


def _lines(found: Mapping[str, Measured], is_full: bool) -> Iterator[str]:
    for claim in ROWS:
        outside = live(claim)
        ours = found[claim.measure.__name__] if claim.measure else {}
        said = verdict(claim, {**found, **outside}) if is_full else "-"
        cells = (_cell(claim, ours), _cell(claim, outside.get("live", {})), said)
        yield f"| {' | '.join((claim.what, claim.source, claim.says, *cells, claim.differs))} |\n"


def _own(claim: Claim, found: Mapping[str, Measured]) -> Measured:
    return {**(found[claim.measure.__name__] if claim.measure else {}), **found.get("live", {})}


def _cell(claim: Claim, figures: Measured) -> str:
    shown = (
        f"**{_shown(name, spread)}**" if name in claim.claimed else _shown(name, spread)
        for name, spread in figures.items()
    )
    return "; ".join(shown) or "-"


def _shown(name: str, spread: Spread) -> str:
    """Writes a figure in its unit, with its extremes, before the rest of its name."""
    unit, _, rest = name.partition(" ")

    def number(value: float) -> str:
        match unit:
            case "x":
                return f"{value:.2f}" if value < 10 else f"{value:.1f}"
            case "%":
                return f"{100 * value:.1f}"
            case "+%":
                return f"{100 * value:+.1f}"
        return format_number(value)

    low, median, high = map(number, (spread.low, spread.median, spread.high))
    sign = {"x": "x", "%": " %", "+%": " %"}.get(unit, f" {unit}")
    extremes = "" if low == high else f" ({low} to {high})"
    return f"{median}{sign}{extremes} {rest}"


def _counted(verdicts: Iterable[str]) -> list[dict[str, object]]:
    said = [*verdicts]
    return [{"verdict": each, "rows": said.count(each)} for each in ("yes", "partly", "no", "another claim")]


if __name__ == "__main__":
    sys.exit(main())

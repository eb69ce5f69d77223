"""`sluice bench`: send traffic of several tenants to an OpenAI-compatible server, and measure what each gets."""

import json
import os
import shlex
import shutil
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.cli.arguments import argument, duration
from labs.bench.benchmark import Benchmark, Fault, Result, running
from labs.bench.exchange import Outcome
from labs.bench.generator import Generator
from labs.bench.records import Record, read_record
from labs.bench.report import as_json, as_markdown, as_page, as_text, facts, sections
from labs.bench.scenario import Scenario
from labs.bench.workloads import WORKLOADS
from labs.cli.simulate_flags import new_file, sweep_loads
from labs.simulation.errors import OptionError
from labs.simulation.metrics import escape_controls

ADMIN_KEY_VARIABLE = "SLUICE_ADMIN_KEY"
PLAIN_PROGRESS_SECONDS = 10  # between two lines where standard error is no terminal
NOTES = f"""\
workloads:
{chr(10).join(f"  {name:<12}{workload.what}" for name, workload in WORKLOADS.items())}

A file of several tenants, with all fields of a tenant in docs/bench.md:
  seconds: 60
  targets: {{ttft: 500ms, per_token: 50ms}}
  tenants:
    acme: {{key_env: ACME_KEY, weight: 2, workload: chat, rate: 5, service_tier: priority, leave: 0.1}}
    labs: {{key_env: LABS_KEY, workload: summary, clients: 8, retries: 2}}

examples:
  sluice bench http://127.0.0.1:8000 --workload chat --rate 5 --ttft 500ms --html chat.html
  sluice bench http://127.0.0.1:8000 --workload rag --rate 1 --sweep 1:20:8 --ttft 2s
  sluice bench http://127.0.0.1:8000 --trace azure2023_conv.csv --speed 0.1 --seconds 120s
  sluice bench http://127.0.0.1:8000 --scenario tenants.yaml --admin-url http://127.0.0.1:8001 --json run.json"""


def add_bench_command(commands: "_SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a server under traffic of several tenants",
        usage="sluice bench URL (--scenario FILE | --rate R | --clients N | --trace FILE) [flags]",
        description=__doc__,
        epilog=NOTES,
    )
    parser.add_argument("url", metavar="URL", help="base URL of the server, with /v1 or without")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--scenario", metavar="FILE", type=Path, help="tenants and their traffic, as YAML")
    pace = traffic.add_mutually_exclusive_group()
    pace.add_argument("--rate", metavar="R", type=float, help="sessions a second, Poisson unless --burstiness")
    pace.add_argument("--clients", metavar="N", type=int, help="clients that each wait for their answers")
    pace.add_argument("--trace", metavar="FILE", type=Path, help="times and lengths of a trace that `simulate` reads")
    traffic.add_argument("--burstiness", metavar="K", type=float, help="shape of the gamma intervals; 1 is Poisson")
    traffic.add_argument("--speed", metavar="X", type=float, help="send a trace X times as fast")
    traffic.add_argument("--think", metavar="D", help="mean pause of a client between two sessions, such as 2s")
    traffic.add_argument("--workload", choices=tuple(WORKLOADS), help="lengths, turns and waits (default: chat)")
    traffic.add_argument("--prompt-tokens", metavar="N", type=int, help="of every prompt, in place of the workload's")
    traffic.add_argument("--output-tokens", metavar="N", type=int, help="of every answer, at most")
    traffic.add_argument("--leave", metavar="SHARE", type=float, help="share of streams cut at a random token")
    traffic.add_argument("--slow", metavar="SHARE", type=float, help="share of streams read slowly")
    traffic.add_argument("--retries", metavar="N", type=int, help="attempts after a refusal, as the openai package's")
    traffic.add_argument("--deadline", metavar="D", help="tell Sluice a deadline of the last token")
    traffic.add_argument("--service-tier", metavar="NAME", help="service_tier of the requests")
    traffic.add_argument("--model", metavar="NAME", help="model to ask for (default: the server's first)")
    traffic.add_argument("--key", metavar="KEY", help="API key (default: the variable OPENAI_API_KEY)")
    traffic.add_argument("--body", metavar="JSON", type=argument(_json), help="more fields of each request")
    traffic.add_argument("--ignore-eos", action="store_true", help="answers of full length, on servers like vLLM")
    course = parser.add_argument_group("course")
    course.add_argument("--seconds", metavar="D", help="arrivals for D (default: 30s)")
    course.add_argument("--warm-up", metavar="D", help="of these, do not count the first D")
    course.add_argument("--drain", metavar="D", help="wait at most D for answers afterwards (default: 60s)")
    course.add_argument("--seed", metavar="N", type=int, help="of arrivals, lengths and prompts (default: 1)")
    course.add_argument(
        "--sweep", metavar="LOW:HIGH[:N]", type=sweep_loads, help="run at multiples of the pace, and find the knee"
    )
    course.add_argument(
        "--fault", metavar="COMMAND", type=argument(_command), help="run a command that breaks something"
    )
    course.add_argument("--fault-at", metavar="D", type=duration, help="when (default: after half of the seconds)")
    judged = parser.add_argument_group("a good request")
    judged.add_argument("--ttft", metavar="D", help="has its first token within D")
    judged.add_argument("--per-token", metavar="D", help="and then a token every D on average")
    judged.add_argument("--total", metavar="D", help="and is answered within D")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--admin-url", metavar="URL", default="",
        help=f"compare usage with Sluice's ledger on its admin port; {ADMIN_KEY_VARIABLE} has the key",
    )  # fmt: skip
    report.add_argument("--json", metavar="FILE", type=new_file, help="write every figure")
    report.add_argument("--markdown", metavar="FILE", type=new_file, help="write the tables as Markdown")
    report.add_argument("--html", metavar="FILE", type=new_file, help="write one page that needs nothing else")
    report.add_argument(
        "--beside", metavar="FILE", type=Path, action="append", default=[],
        help="show the result of another tool beside: JSON of guidellm, AIPerf or vllm bench; may be repeated",
    )  # fmt: skip
    report.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=_bench, parser=parser)


OF_TENANT = (
    "rate", "clients", "trace", "burstiness", "speed", "think", "workload", "prompt_tokens", "output_tokens", "leave",
    "slow", "retries", "deadline", "service_tier", "model", "key", "body",
)  # fmt: skip
OF_SCENARIO = ("seconds", "warm_up", "drain", "seed")
OF_TARGETS = ("ttft", "per_token", "total")


def _bench(namespace: Namespace) -> int:
    scenario, beside = _scenario(namespace), [read_record(path) for path in namespace.beside]
    faults = []
    if namespace.fault is not None:
        at = scenario.seconds / 2 if namespace.fault_at is None else namespace.fault_at
        faults.append(Fault(at, running(namespace.fault)))
        if not scenario.warm_up < at < scenario.seconds:
            raise OptionError("--fault-at", f"{at:g}", f"must be within the {scenario.seconds:g} s of arrivals")
    benchmark = Benchmark(namespace.url, scenario, namespace.admin_url, os.environ.get(ADMIN_KEY_VARIABLE, ""))
    results = [
        benchmark.run(load, _say_nothing if namespace.quiet else _show_progress, faults)
        for load in namespace.sweep or (1.0,)
    ]
    if sys.stderr.isatty() and not namespace.quiet:
        print(file=sys.stderr)
    _write(namespace, scenario, benchmark, results, beside)
    return 0 if all(result.is_settled for result in results) else 1


def _scenario(namespace: Namespace) -> Scenario:
    """The scenario of the flags, or of a file, of which flags replace the course and the targets."""
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    tenant = {name: given[name] for name in OF_TENANT if name in given}
    if namespace.ignore_eos:
        tenant["body"] = {"ignore_eos": True} | tenant.get("body", {})
    course: dict[str, Any] = {name: given[name] for name in OF_SCENARIO if name in given}
    if targets := {name: given[name] for name in OF_TARGETS if name in given}:
        course["targets"] = targets
    if namespace.scenario is None:
        return Scenario.parse({**course, "tenants": {"default": tenant}}, "flags")
    if tenant:
        raise OptionError(f"--{next(iter(tenant)).replace('_', '-')}", "", "is of a tenant, and --scenario names them")
    return Scenario.read(namespace.scenario, course)


def _write(
    namespace: Namespace, scenario: Scenario, benchmark: Benchmark, results: list[Result], beside: list[Record]
) -> None:
    said = facts(namespace.url, scenario, (model.name for model in benchmark.models.values()))
    doubts = [escape_controls(doubt) for doubt in dict.fromkeys(doubt for one in results for doubt in one.remarks)]
    parts, title = sections(results, beside), "Benchmark"
    written: dict[Path | None, Callable[[], str]] = {
        namespace.json: lambda: as_json(
            {
                "url": namespace.url,
                "facts": said,
                "remarks": doubts,
                "scenario": scenario.without_keys(),
                "beside": [asdict(one) for one in beside],
            },
            results,
        ),
        namespace.markdown: lambda: as_markdown(title, said, doubts, parts),
        namespace.html: lambda: as_page(title, said, doubts, parts, results),
    }
    try:
        for path, render in written.items():
            if path is not None:
                path.write_text(render(), encoding="utf-8")
    except OSError as error:
        raise OptionError("--json", str(error.filename), f"cannot be written ({error.strerror})") from None
    print("\n".join([escape_controls(said), "", *(f"! {doubt}" for doubt in doubts), *([""] if doubts else [])]))
    print(as_text(parts))


def _say_nothing(_: Generator) -> None:
    pass


def _show_progress(generator: Generator) -> None:
    now, counts = generator.now, generator.outcomes
    if not sys.stderr.isatty() and int(now) % PLAIN_PROGRESS_SECONDS:
        return
    shown = " · ".join(f"{counts[outcome]:,} {outcome}" for outcome in Outcome if counts[outcome])
    line = f"{now:5.0f} s · {generator.num_pending:,} in flight · {shown}"
    print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, end="", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        print(file=sys.stderr)


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    return value


def _command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"is no command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError("is no command that this machine has")
    return text

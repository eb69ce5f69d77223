"""Our engine behind its gateway: `sluice serve` in a process on the measured core, streamed to clients on this one."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.benchmarks.fresh import cached_tokens
from labs.benchmarks.gateway_process import gateway_process
from labs.benchmarks.load import all_at_once, post
from labs.benchmarks.machine import cpu_seconds
from labs.benchmarks.peers.peer import Generate, Generated, answer_requests, parser
from labs.benchmarks.workload import Workload

KEY = "sk-benchmark"
NAME = "random"


@contextmanager
def load(options: Namespace) -> Iterator[Generate]:
    settings = {
        "model": options.model,
        "served_model_name": NAME,
        "demo_key": KEY,
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "threads": 1,
        "prefix_cache": "off",
        "metrics_on_tenant_port": True,
    }
    with (
        TemporaryDirectory() as state_dir,
        gateway_process(Path(state_dir), options.server_core, **settings) as server,
    ):

        def generate(workload: Workload) -> Generated:
            requests = [_request(*pair) for pair in zip(workload.prompts, workload.max_tokens, strict=True)]
            before = cpu_seconds(server.pid)
            seconds, times = all_at_once(server.port, requests)
            tokens = [each[:-2] for each in times]  # the last two events: the finish and [DONE]
            used = cpu_seconds(server.pid) - before
            return Generated(seconds, tokens, cached_tokens(server.port), used)

        yield generate


def _request(prompt: list[int], max_tokens: int) -> bytes:
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return post("/v1/completions", body | {"ignore_eos": True, "skip_special_tokens": False}, KEY)


if __name__ == "__main__":
    own = parser()
    own.add_argument("--server-core", type=int, required=True)
    answer_requests(own.parse_args(), load)

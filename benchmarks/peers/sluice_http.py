"""Our engine behind its gateway: `sluice serve` in a process on the measured core, streamed to clients on this one."""

import atexit
import os
import re
import subprocess
import sys
from argparse import Namespace
from tempfile import TemporaryDirectory

from benchmarks.load import all_at_once, post
from benchmarks.machine import on_core
from benchmarks.peers.peer import Generate, Generated, answer_requests, parser
from benchmarks.workload import Workload

KEY = "sk-benchmark"
NAME = "random"
READY = re.compile(r"ready at http://127\.0\.0\.1:(\d+)")


def load(options: Namespace) -> Generate:
    state = TemporaryDirectory()
    server = _serve(options, state.name)
    atexit.register(_end, server, state)
    port = _port(server)

    def generate(workload: Workload) -> Generated:
        requests = [_request(*pair) for pair in zip(workload.prompts, workload.max_tokens, strict=True)]
        seconds, times = all_at_once(port, requests)
        return Generated(seconds, [each[:-2] for each in times])  # the last two events are the finish and [DONE]

    return generate


def _serve(options: Namespace, state_dir: str) -> "subprocess.Popen[str]":
    flags = {
        "model": options.model,
        "served-model-name": NAME,
        "dtype": options.dtype,
        "max-num-seqs": options.max_num_seqs,
        "threads": 1,
        "port": 0,
        "log-level": "warning",
        "state-dir": state_dir,
    }
    command = [sys.executable, "-m", "gateway.cli", "serve", *(f"--{name}={value}" for name, value in flags.items())]
    environ = {**os.environ, "SLUICE_DEMO_KEY": KEY}
    with on_core(options.server_core):
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def _port(server: "subprocess.Popen[str]") -> int:
    assert server.stdout is not None
    for line in server.stdout:
        if found := READY.search(line):
            return int(found.group(1))
    raise RuntimeError(f"sluice serve ended with status {server.wait()}")


def _end(server: "subprocess.Popen[str]", state: "TemporaryDirectory[str]") -> None:
    server.terminate()
    server.communicate()
    state.cleanup()


def _request(prompt: list[int], max_tokens: int) -> bytes:
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return post("/v1/completions", body | {"ignore_eos": True, "skip_special_tokens": False}, KEY)


if __name__ == "__main__":
    own = parser()
    own.add_argument("--server-core", type=int, required=True)
    answer_requests(own.parse_args(), load)

"""LiteLLM's proxy as a process, set up as its documentation says for production, with limits for each key in Redis.

One worker, no debug logging, a master key, `coordination_redis` for its limits. Keys with limits of their own need its
Postgres database, or a `custom_auth` function that returns them: `peers/litellm_keys.py`, which spares it the database.
Its default limiter (v3) then counts requests and tokens of each key in Redis, reserving tokens beforehand. Routing is
`simple-shuffle`, which its documentation recommends; usage-based routing is slower. Nothing is retried or cached.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

from backend.bound_process import bound
from backend.timed_run import end_group
from labs.benchmarks.litellm_environment import litellm_command
from labs.benchmarks.machine import on_core
from labs.benchmarks.processes import CLEAN_UP_SECONDS, WorkerFailed, free_port

KEY = "sk-benchmark"  # and its limits: peers/litellm_keys.py
KEYS = Path(__file__).parent / "peers" / "litellm_keys.py"
START_SECONDS = 180
ENVIRONMENT = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
}


@contextmanager
def litellm_proxy(core: int, backend_port: int, redis_port: int) -> Iterator[int]:
    """Its port, once it answers. Raises `WorkerFailed`."""
    with TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        shutil.copy(KEYS, directory)
        config = directory / "config.yaml"
        config.write_text(json.dumps(_config(backend_port, redis_port)))  # JSON is YAML
        arguments = ["--config", config, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        with on_core(core), (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                **bound([litellm_command(), *arguments, "--telemetry", "False"]),
                cwd=directory,
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=log,
            )
        try:
            _wait_until_ready(process, port, directory / "log")
            yield port
        finally:
            end_group(process, CLEAN_UP_SECONDS)


def _config(backend_port: int, redis_port: int) -> dict[str, object]:
    backend = {"model": "openai/embedded", "api_base": f"http://127.0.0.1:{backend_port}/v1", "api_key": "sk-backend"}
    return {
        "model_list": [{"model_name": "embedded", "litellm_params": backend}],
        "general_settings": {
            "master_key": "sk-master-of-the-benchmark",
            "custom_auth": f"{KEYS.stem}.key_of",
            "coordination_redis": {"host": "127.0.0.1", "port": redis_port},
        },
        "litellm_settings": {"set_verbose": False, "request_timeout": 600},
        "router_settings": {"routing_strategy": "simple-shuffle", "num_retries": 0},
    }


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise WorkerFailed(f"litellm did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health/liveliness")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()

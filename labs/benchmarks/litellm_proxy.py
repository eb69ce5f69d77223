"""LiteLLM's proxy as a process, set up as its documentation says for production, with limits for each key in Redis.

One worker, no debug logging, a master key, `coordination_redis` for its limits. Keys with limits of their own need its
Postgres database, or a `custom_auth` function that returns them: `peers/litellm_keys.py`, which spares it the database.
Its default limiter (v3) then counts requests and tokens of each key in Redis, reserving tokens beforehand. Routing is
`simple-shuffle`, which its documentation recommends; usage-based routing is slower. Nothing is retried or cached.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.benchmarks.litellm_environment import litellm_command
from labs.benchmarks.peer_server import PeerServer, peer_server
from labs.benchmarks.processes import free_port

KEY = "sk-benchmark"  # and its limits: peers/litellm_keys.py
KEYS = Path(__file__).parent / "peers" / "litellm_keys.py"
ENVIRONMENT = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
}


@contextmanager
def litellm_proxy(
    core: int, backend_port: int, redis_port: int, model: str = "openai/embedded"
) -> Iterator[PeerServer]:
    """A proxy before a `model`, as LiteLLM names it with its kind of server. Raises `WorkerFailed`."""
    with TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        shutil.copy(KEYS, directory)
        config = directory / "config.yaml"
        config.write_text(json.dumps(_config(backend_port, redis_port, model)))  # JSON is YAML
        arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        command = [str(litellm_command()), *arguments, "--telemetry", "False"]
        with peer_server(command, {core}, ENVIRONMENT, directory, f"{port}/health/liveliness") as server:
            yield server


def _config(backend_port: int, redis_port: int, model: str) -> dict[str, object]:
    backend = {"model": model, "api_base": f"http://127.0.0.1:{backend_port}/v1", "api_key": "sk-backend"}
    return {
        "model_list": [{"model_name": model.rpartition("/")[2], "litellm_params": backend}],
        "general_settings": {
            "master_key": "sk-master-of-the-benchmark",
            "custom_auth": f"{KEYS.stem}.key_of",
            "coordination_redis": {"host": "127.0.0.1", "port": redis_port},
        },
        "litellm_settings": {"set_verbose": False, "request_timeout": 600},
        "router_settings": {"routing_strategy": "simple-shuffle", "num_retries": 0},
    }

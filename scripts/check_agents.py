#!/usr/bin/env python3
"""Run what agents are built with, untouched, against a live server: `scripts/check_agents.py [--only NAME ...]`.

openai and anthropic for Python and for Node, openai-agents, instructor, pydantic-ai, langchain-openai, LlamaIndex,
litellm, the AI SDK, Claude Code and Codex, by the programs in scripts/agents: chats, responses and messages, tool calls
one and many, whole and streamed, their results, pydantic and zod models, log probabilities, embeddings. Each is
installed at first use into an environment of its own below the cache directory ($SLUICE_CACHE_DIR, else
~/.cache/sluice), from the package indexes that pip and npm are set up for. Writes
labs/benchmarks/results/agent_clients.json; exit status 1 when a check failed.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.bound_process import bound
from backend.timed_run import run_within
from labs.benchmarks import machine
from labs.benchmarks.cache import cache_dir
from labs.benchmarks.embeddings import save_encoder
from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.report import RESULTS, Report
from labs.benchmarks.served import served

PROGRAMS = Path(__file__).parent / "agents"
CLIENTS = {
    "openai_python": "openai==3.54.0",
    "openai_agents": "openai-agents==0.24.0",
    "anthropic_python": "anthropic==2.14.0",
    "instructor_client": "instructor==1.17.0",
    "pydantic_ai_agent": "pydantic-ai-slim[openai]==2.68.0",
    "langchain_client": "langchain-openai==1.7.3",
    "llama_index_client": "llama-index-embeddings-openai-like==0.4.0",
    "litellm_client": "litellm==1.106.2",
}
ALSO = {"litellm_client": ["mcp"]}  # which its tools import, and it does not ask for
NODE = {  # the first is the client
    "openai_node": ("openai@6", "zod@4"),
    "anthropic_node": ("@anthropic-ai/sdk@1",),
    "ai_sdk": ("ai@6", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3", "zod@4"),
    "claude_code": ("@anthropic-ai/claude-code@2.1.197",),
    "codex": ("@openai/codex@0.171.0",),
}
TENANT, MODEL, EMBEDDING_MODEL = "agents", "embedded", "encoder"
CLIENT_TIMEOUT_SECONDS = 600.0  # for one client: the first import of each takes minutes on a busy machine


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    names = [*CLIENTS, *NODE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these clients")
    parser.add_argument("--http-workers", type=int, default=0, help="of the server (default: %(default)s)")
    options = parser.parse_args(arguments)
    report = Report("agent_clients")
    core, _ = machine.two_cores()
    with TemporaryDirectory() as folder:
        encoder = save_encoder(Path(folder) / EMBEDDING_MODEL)
        settings: dict[str, object] = {"http_workers": options.http_workers, "embedding_model": encoder}
        with served(core, [TENANT], Path(folder) / "state", **settings) as gateway:
            rows = [row for name in options.only for row in checked(name, gateway.port, gateway.keys[TENANT])]
    report.add_table("agents", rows)
    for row in rows:
        report.at_least(f"{row['client']}: {row['check']}", float(row["problem"] is None), 1.0)
    return report.finish(RESULTS)


def checked(name: str, port: int, key: str) -> Iterator[dict[str, object]]:
    """A row for each check of one client."""
    requirement, command = node(name) if name in NODE else (CLIENTS[name], python(name))
    url = f"http://127.0.0.1:{port}"
    environ = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "SLUICE_MODEL": MODEL,
        "SLUICE_EMBEDDING_MODEL": EMBEDDING_MODEL,
    }
    environ |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
    done = run_within(CLIENT_TIMEOUT_SECONDS, command, env=os.environ | environ, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        lines.append({"check": "it runs", "problem": done.stderr[-1500:]})
    for line in lines:
        if line["problem"]:
            print(f"{requirement}: {line['check']}\n{line['problem']}", file=sys.stderr)
        problem = line["problem"] and line["problem"].strip().splitlines()[-1][:200]
        yield {"client": requirement, "check": line["check"], "problem": problem}


def python(name: str) -> list[str]:
    return [str(own_environment(CLIENTS[name], also=ALSO.get(name, ())) / "python"), str(PROGRAMS / f"{name}.py")]


def node(name: str) -> tuple[str, list[str]]:
    """The packages beside a copy of the program, because Node looks for them from there."""
    folder, packages = cache_dir() / f"node-{name}", NODE[name]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules").exists():
        command = ["npm", "install", "--silent", "--prefix", str(folder), *packages]
        subprocess.run(**bound(command), check=True)
    client = packages[0].rpartition("@")[0]
    installed = json.loads((folder / "node_modules" / client / "package.json").read_text())["version"]
    for program in (f"{name}.mjs", "checks.mjs"):
        (folder / program).write_bytes((PROGRAMS / program).read_bytes())
    return f"{client}@{installed} for Node", ["node", str(folder / f"{name}.mjs")]


if __name__ == "__main__":
    sys.exit(main())

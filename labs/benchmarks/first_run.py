"""The parts of a first start, in CPU time: `python -m labs.benchmarks.first_run [--commit REF] [--uv PATH]`.

Each run unpacks a commit into an empty folder, runs its `scripts/serve` there as a user would, with a home of its own,
and streams one request. Counted is CPU time, user and system, of all processes until the first token arrives: wall time
says more about the network. Each installer runs twice, with its cache empty and with what it then holds.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread

from backend.bound_process import bound
from backend.timed_run import end_group
from labs.benchmarks.processes import ROOT
from labs.benchmarks.report import RESULTS, Report

SAMPLE_SECONDS = 0.2
MOST_CPU_SECONDS = {"pip": 60.0, "uv": 40.0}
MOST_MEBIBYTES = 1240.0  # 1.3 GB
END_SECONDS = 60.0
TIMEOUT_SECONDS = 3600.0  # a slow network
SIZE = ".venv, MiB"
SERVE = "start to the first token"
PARTS = {  # by a part of the command line; child processes count with it
    "virtual environment": r" -m venv |\buv venv ",
    "packages": r" -m pip |\buv pip ",
    "C++ kernels": r" -m backend\.kernels\.build",
    "compiled core": r" -m backend\.compile_core|scripts/compile\b",
    SERVE: r"[ /]sluice serve",
}
MEBIBYTE = 2**20


@dataclass
class Processes:
    """Watches a process and all that it starts, and adds up their CPU time by part."""

    root: int
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Part and CPU seconds, by process, of the topmost processes of each part."""
    before_serving: float = 0.0
    done: Event = field(default_factory=Event)

    def watch(self) -> None:
        while not self.done.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        stats = dict(_stats())
        below = defaultdict(list)
        for pid, (parent, _) in stats.items():
            below[parent].append(pid)

        def total(pid: int) -> float:
            return stats[pid][1] + sum(total(child) for child in below[pid])

        def visit(pid: int) -> None:
            part = _part(pid)
            if part is None or part == SERVE:
                for child in below[pid]:
                    visit(child)
            else:
                self.seen[pid] = part, max(total(pid), self.seen.get(pid, ("", 0.0))[1])

        visit(self.root)
        everything = total(self.root)
        parts = defaultdict(float)
        for part, seconds in self.seen.values():
            parts[part] += seconds
        if _part(self.root) == SERVE:
            parts[SERVE] = everything - self.before_serving
        else:
            self.before_serving = everything
        parts["the scripts"] = max(0.0, everything - sum(parts.values()))
        return dict(parts)


def _stats() -> Iterator[tuple[int, tuple[int, float]]]:
    """Parent and CPU seconds of each process, its ended children included."""
    ticks = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        yield int(path.name), (int(fields[1]), sum(map(int, fields[11:15])) / ticks)


def _part(pid: int) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return next((part for part, pattern in PARTS.items() if re.search(pattern, command)), None)


def first_run(commit: str, place: Path, caches: Path, uv: Path | None) -> dict[str, object]:
    """The cost of a commit's first start: seconds by part, and sizes in MiB."""
    checkout = place / "sluice"
    checkout.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=checkout, input=archive, check=True)
    began = time.monotonic()
    process = subprocess.Popen(
        **bound(["scripts/serve", "--port", "0", "--admin-port", "0"]),
        cwd=checkout,
        env=_environment(place, caches, uv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
    )
    processes = Processes(process.pid)
    watcher = Thread(target=processes.watch, daemon=True)
    watcher.start()
    try:
        assert process.stdout is not None
        said = ""
        while "curl" not in said:
            line = process.stdout.readline()
            assert line, "it did not start"
            said += line
        _stream(said)
        wall = time.monotonic() - began
        processes.done.set()
        watcher.join()
        parts = processes.look()
        return {
            **{name: round(parts.get(name, 0.0), 1) for name in (*PARTS, "the scripts")},
            "all": round(sum(parts.values()), 1),
            "wall": round(wall, 1),
            SIZE: _mebibytes(checkout / ".venv"),
            "cached downloads, MiB": _mebibytes(caches),
        }
    finally:
        processes.done.set()
        end_group(process, END_SECONDS)


def _environment(place: Path, caches: Path, uv: Path | None) -> dict[str, str]:
    ours = ("SLUICE_", "PYTHON", "VIRTUAL_ENV", "XDG_", "PIP_CACHE_DIR")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    (place / "home").mkdir()
    environ |= {"HOME": str(place / "home"), "PIP_CACHE_DIR": str(caches), "UV_CACHE_DIR": str(caches)}
    if uv is not None:
        folder = place / "bin"
        folder.mkdir()
        (folder / "uv").symlink_to(uv)
        environ |= {"PATH": f"{folder}:{environ['PATH']}", "INSTALLER": "uv"}
        if "PIP_FIND_LINKS" in environ:
            environ["UV_FIND_LINKS"] = environ["PIP_FIND_LINKS"]
    return environ


def _stream(said: str) -> None:
    """Send the request that was shown, and wait for the first text."""
    address, path = re.search(r"curl -N http://([^/\s]+)(\S+)", said).groups()
    key, body = re.search(r"Bearer (\S+?)'", said)[1], re.search(r"-d '(.*)'", said)[1]
    connection = HTTPConnection(address, timeout=TIMEOUT_SECONDS)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", path, body=body, headers=headers)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            if choices and choices[0]["delta"].get("content"):
                return
    raise AssertionError("no token")


def _mebibytes(folder: Path) -> int:
    inodes = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        inodes[stat.st_ino] = stat.st_blocks * 512
    return round(sum(inodes.values()) / MEBIBYTE)


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--commit", nargs="+", default=["HEAD"], help="what is installed, one after the other")
    parser.add_argument("--uv", type=Path, help="the program, to measure with it as well as with pip")
    parser.add_argument("--scratch", type=Path, help="where the environments are made, some GiB")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    report = Report("first_run")
    for commit in options.commit:
        rows = []
        for installer, uv in {"pip": None, **({"uv": options.uv} if options.uv else {})}.items():
            with tempfile.TemporaryDirectory(dir=options.scratch, prefix="first-run-") as scratch:
                caches = Path(scratch, "caches")
                for cache in ("cold", "warm"):
                    place = Path(scratch, cache)
                    rows.append({"run": f"{installer}, {cache}", **first_run(commit, place, caches, uv)})
                    print(rows[-1], flush=True)
                    shutil.rmtree(place)
        report.add_table(f"CPU seconds until the first token, {commit}", rows)
        for row in rows:
            run, seconds, size = str(row["run"]), float(str(row["all"])), float(str(row[SIZE]))
            report.at_most(f"{commit}, {run}: CPU seconds", seconds, MOST_CPU_SECONDS[run.partition(",")[0]])
            report.at_most(f"{commit}, {run}: MiB of .venv", size, MOST_MEBIBYTES)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Prepare minutes on a machine with a GPU, where nothing of ours is installed and nothing can be fetched; keep figures.

    scripts/gpu_visit.py gather --python /path/to/python3   what it lacks, into .gpu; prints the command to run there
    scripts/gpu_visit.py command                            prints it again
    scripts/gpu_visit.py record gpu-out                     what came back, into labs/benchmarks/results, and as a table

`--python` names an interpreter like that machine's: its version of Python, torch and triton, and the packages that it
has. Wheels are fetched of what is missing there, in the versions of constraints.txt; the core is compiled for it; and
Triton's cache is filled, without a GPU, at the path where the machine unpacks it. `scripts/gpu_box` runs there.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.bound_process import bound
from labs.benchmarks.gpu_check.finding import Finding

ROOT = Path(__file__).resolve().parent.parent
GATHERED = ROOT / ".gpu"
RESULTS = ROOT / "labs" / "benchmarks" / "results" / "gpu"
TRITON_CACHE = Path("/tmp/sluice-gpu/triton")  # as in scripts/gpu_box: a cache serves at the path where it was made
MOST_BYTES = 40 << 20
THERE = {"torch", "triton"}  # in any version: they are under test
FOR_TESTS = ("pytest-asyncio",)
ALWAYS = {"protobuf", "typing-extensions"}  # others ask for their newest versions
GLIBC = range(35, 16, -1)  # minor versions that wheels may ask for: Ubuntu 22.04 has 2.35
KEPT = {".cubin", ".json", ".so"}  # suffixes of Triton's cache


def gather(python: str, arch: int) -> None:
    GATHERED.mkdir(exist_ok=True)
    _fetch_wheels(python, GATHERED / "wheels")
    _compile_core(python, GATHERED / "core.txz")
    _fill_cache(python, arch, GATHERED / "triton.txz")
    sizes = {path: path.stat().st_size for path in sorted(GATHERED.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        print(f"{size / 2**20:7.2f} MiB  {path.relative_to(ROOT)}")
    print(f"{sum(sizes.values()) / 2**20:7.2f} MiB")
    if sum(sizes.values()) > MOST_BYTES:
        sys.exit(f"that is more than {MOST_BYTES >> 20} MiB")


def lacking(there: dict[str, str]) -> list[str]:
    """The packages that the project and its tests need besides the present ones (versions by name), in the tested
    versions.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    waiting, found = [*project["dependencies"], *FOR_TESTS], dict[str, str]()
    while waiting:
        needed = Requirement(waiting.pop())
        name = canonicalize_name(needed.name)
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if not applies or name in found or name in THERE:
            continue
        if name in ALWAYS or name not in there or not needed.specifier.contains(there[name], prereleases=True):
            found[name] = versions.get(name) or version(name)  # of what few machines have, nothing is pinned
            waiting += _needs(name, needed.extras)
    return [f"{name}=={found[name]}" for name in sorted(found)]


def _needs(name: str, extras: Iterable[str]) -> Iterator[str]:
    """The requirements of a package, as it is installed beside this script."""
    try:
        every = requires(name) or []
    except PackageNotFoundError:
        sys.exit(f"{name} is not installed for {sys.executable}: run this with the project's own environment")
    for text in every:
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield text.partition(";")[0]


def packages(python: str) -> dict[str, str]:
    listed = json.loads(_run(python, "-m", "pip", "list", "--format=json"))
    return {canonicalize_name(package["name"]): package["version"] for package in listed}


def _fetch_wheels(python: str, folder: Path) -> None:
    wanted = set(lacking(packages(python)))
    for wheel in folder.glob("*.whl"):
        name, version, *_ = parse_wheel_filename(wheel.name)
        if (known := f"{name}=={version}") in wanted:
            wanted.remove(known)
        else:
            wheel.unlink()
    if not wanted:
        return
    release = _run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    how = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={release}", *platforms]
    print(f"fetching {len(wanted)} wheels for Python {release}", flush=True)
    _run(sys.executable, "-m", "pip", "download", "--quiet", *how, f"--dest={folder}", *sorted(wanted))


def _compile_core(python: str, archive: Path) -> None:
    """Compile the core, unless it is up to date."""
    name = "from backend.compiled_core import directory_name, sources; print(directory_name(sources()))"
    directory = _run(python, "-c", name).strip()
    if archive.exists():
        with tarfile.open(archive) as packed:
            if directory in packed.getnames():
                return
    print("compiling the core", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "bin" / "python"
        _run(python, "-m", "venv", folder)
        constraints = f"--constraint={ROOT / 'constraints.txt'}"
        _run(str(own), "-m", "pip", "install", "--quiet", "mypy", "setuptools", constraints)
        _run(str(own), "-m", "backend.compile_core")
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(Path(folder) / "share" / "sluice" / directory, directory)


def _fill_cache(python: str, arch: int, archive: Path) -> None:
    """Fill Triton's cache, reusing the last visit's."""
    TRITON_CACHE.mkdir(parents=True, exist_ok=True)
    if archive.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(TRITON_CACHE, filter="data")
    print(f"compiling kernels for sm_{arch}", flush=True)
    print(_run(python, "scripts/compile_kernels.py", f"--cache={TRITON_CACHE}", "--arch", str(arch)), end="")
    with tarfile.open(archive, "w:xz") as packed:
        for path in sorted(TRITON_CACHE.rglob("*")):
            if path.suffix in KEPT:
                packed.add(path, path.relative_to(TRITON_CACHE))


def _run(*command: str) -> str:
    done = subprocess.run(**bound(command), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


COMMAND = "bash scripts/gpu_box"
AGAIN = f"{COMMAND} --parts packed serving qwen3-0.6b beside"


def show_command() -> None:
    print(f"""
On the machine, in a copy of this tree with .gpu in it (tracked files and .gpu are all that it takes), within 8 minutes;
what it finds is in $OUT, or in gpu-out beside it:

{COMMAND}

and to run parts again after a fix, or others (`record` takes all that lies in one folder):

{AGAIN}
{COMMAND} --parts engine --without-graphs  # where recording graphs fails
{COMMAND} --parts engine --kv-gib 20       # where memory runs out
{COMMAND} --parts engine --kernels torch   # where Triton cannot compile what launches its kernels
{COMMAND} test -m gpu tests/gpu

With ssh: rsync -a --delete --exclude=/.venv* --exclude=/.git ./ BOX:sluice/ && ssh BOX 'cd sluice && {COMMAND}';
rsync -a BOX:sluice/gpu-out/ gpu-out/""")


@dataclass(frozen=True, slots=True)
class Row:
    """A claim about a GPU, and the findings that show it: a pattern for each part."""

    number: int
    claim: str
    shown_by: dict[str, str]


ROWS = (
    Row(1, "kernels are their references", {"correctness": "", "serving": ""}),
    Row(2, "tokens are transformers'; 16 bits beside 32", {"agreement": ""}),
    Row(3, "the same tokens in every batch and cut", {"same": ""}),
    Row(4, "grammars hold, two steps in flight", {"masks": ""}),
    Row(5, "nothing grows; a second model fits", {"leak": "", "engine": "torch's memory", "llama-3-8b": "reserve"}),
    Row(6, "no bad access, no race", {"sanitize": ""}),
    Row(7, "8B decodes beside their floor", {"llama-3-8b": r"decode, batch (64|256),.*(floor|sampling /)"}),
    Row(
        8,
        "decode attention beside a copy and a peer",
        {"kernels": "decode attention", "fa3": "^decode.*/ ours"},
    ),
    Row(9, "prefill attention beside a peer", {"fa3": "^prefill.*/ ours"}),
    Row(10, "one sequence beside its floor", {"llama-3-8b": "batch 1,.*floor", "qwen3-0.6b": "batch 1,.*floor"}),
    Row(11, "256 requests beside their floor", {"engine": "floor / time|idle"}),
    Row(12, "over HTTP beside offline", {"http": "", "tenants": "of those offline"}),
    Row(13, "shares of the device, and a light tenant beside a flood", {"tenants": "from a share|beside / alone"}),
    Row(14, "dropped streams free their memory", {"tenants": "dropped"}),
    Row(15, "a long prompt beside decodes", {"beside": "p99", "tenants": "p99"}),
    Row(16, "promises are kept", {"tenants": "admitted and missed"}),
    Row(17, "whole engines beside ours", {"peers": "", "vllm": ""}),
    Row(18, "inputs embedded in batches, beside streams", {"embeddings": ""}),
    Row(19, "adapters in a batch, beside none", {"adapters": ""}),
    Row(20, "products of 4 and 8 bits beside those of 16", {"packed": ""}),
)


def record(folder: Path) -> int:
    """Returns how many figures miss their bounds."""
    parts: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"device": None}
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime):  # what was run again counts
        said = json.loads(file.read_text())
        parts |= {part["part"]: part for part in said.pop("parts")}
        found |= {name: value for name, value in said.items() if value is not None}
    if not parts:
        sys.exit(f"there are no figures in {folder}")
    for part in parts.values():
        part["failure"] = _told(part["failure"])
    if (machine := folder / "machine.txt").exists():
        found["machine"] = _facts(machine.read_text(errors="replace"))
    rows = [_judged(row, parts) for row in ROWS]
    found |= {"command": COMMAND, "acceptance": rows, "parts": list(parts.values())}
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", (found["device"] or "none").lower()).strip("-")
    target = RESULTS / f"{name}-{found['date']}.json"
    target.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(f"\n{target.relative_to(ROOT)}")
    if (cache := folder / "triton.txz").exists():
        GATHERED.mkdir(exist_ok=True)
        shutil.copy(cache, GATHERED / "triton.txz")  # the next visit compiles nothing that this one did
    return sum(row["missed"] for row in rows)


def _judged(row: Row, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ran = {name: pattern for name, pattern in row.shown_by.items() if name in parts}
    judged = [
        finding
        for name, pattern in ran.items()
        for finding in parts[name]["findings"]
        if finding["met"] is not None and re.search(pattern, finding["what"])
    ]
    failed = [name for name in ran if parts[name]["failure"]]
    missed = sum(not finding["met"] for finding in judged)
    said = "missed" if missed else "failed" if failed else "met" if judged else "not run"
    about = {"row": row.number, "claim": row.claim, "said": said, "judged": len(judged), "missed": missed}
    return {**about, "not_run": [name for name in row.shown_by if name not in ran]}


def table(found: dict[str, Any]) -> str:
    """For people: the claims, then every figure."""
    lines = [f"{found['device']}, {found['date']}, torch {found.get('torch')}, triton {found.get('triton')}", ""]
    for row in found["acceptance"]:
        without = f", without {', '.join(row['not_run'])}" if row["judged"] and row["not_run"] else ""
        lines.append(f"{row['row']:3} {row['claim']:60} {row['said']:8} {row['judged']:3} judged{without}")
    for part in found["parts"]:
        lines += ["", ": ".join(filter(None, (part["part"], part["failure"])))]
        for finding in part["findings"]:
            lines.append(f"  {Finding(**{name: value for name, value in finding.items() if name != 'met'})}")
    return "\n".join(lines)


def _told(failure: str) -> str:
    """The last line of a failure, without the machine's paths."""
    last = next((line for line in reversed(failure.splitlines()) if line.strip()), "")
    return re.sub(r"/[\w./-]+/", "", last)


def _facts(text: str) -> dict[str, str]:
    """Driver, clocks and power, versions of packages, and whether the core was compiled: no names of the machine."""
    wanted = r"^\s*(Driver Version|Product Name|Current Power Limit|Max Power Limit|Graphics|SM|Memory)\s*:\s*(.+)$"
    facts = dict(reversed(re.findall(wanted, text, re.MULTILINE)))
    packages = re.findall(r"^(torch|triton|numpy|transformers|nvidia-\S+)\s+(\S+)$", text, re.MULTILINE)
    core = "compiled" if re.search(r"^core /", text, re.MULTILINE) else "interpreted"
    return {**facts, **dict(packages), "core": core}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("gather", help="what the machine lacks, into .gpu")
    verb.add_argument("--python", required=True, help="an interpreter like the machine's")
    verb.add_argument("--arch", type=int, default=90, help="of its GPU (default: %(default)s, an H100)")
    verbs.add_parser("command", help="what to run there")
    verb = verbs.add_parser("record", help="keep the figures that came back")
    verb.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.verb == "record":
        return 3 if record(options.folder) else 0
    if options.verb == "gather":
        gather(options.python, options.arch)
    show_command()
    return 0


if __name__ == "__main__":
    sys.exit(main())

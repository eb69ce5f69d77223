"""The results of other generators, so that they can stand beside a benchmark's own: guidellm, AIPerf, vLLM's."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.bench.summary import Latency
from labs.simulation.errors import OptionError

MS = 1e-3
SECONDS_IN = {"ms": MS, "us": 1e-6, "ns": 1e-9, "sec": 1.0, "s": 1.0, "seconds": 1.0}


@dataclass(frozen=True, slots=True)
class Record:
    """What another tool measured of its answered requests; seconds. What it did not measure is None."""

    tool: str
    ttft: Latency
    per_token: Latency  # after a request's first token
    total: Latency


def read_record(path: Path) -> Record:
    """Read a result by its own marks. Raises `OptionError` for anything else."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        for is_of, read in _TOOLS:
            if isinstance(said, dict) and is_of(said):
                return read(said)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise OptionError("--beside", str(path), f"cannot be read: {error!r}") from None
    raise OptionError(
        "--beside", str(path), "is no result of guidellm (kind=json), AIPerf (profile_export_aiperf.json) or vllm bench"
    )


def _of_guidellm(said: Mapping[str, Any]) -> Record:
    metrics = said["benchmarks"][0]["metrics"]

    def latency(name: str, unit: float) -> Latency:
        found = metrics[name]["successful"]
        shares = found.get("percentiles") or {}
        return _latency([found["mean"], found.get("median"), shares.get("p95"), shares.get("p99")], found, unit)

    return Record(
        "guidellm",
        latency("time_to_first_token_ms", MS),
        latency("inter_token_latency_ms", MS),
        latency("request_latency", 1.0),
    )


def _of_aiperf(said: Mapping[str, Any]) -> Record:
    def latency(name: str) -> Latency:
        found = said.get(name)  # answers in one piece have no first token
        if found is None:
            return Latency(None, None, None, None, 0)
        shares = [found.get(share) for share in ("avg", "p50", "p95", "p99")]
        return _latency(shares, found, SECONDS_IN[found["unit"]])

    return Record("AIPerf", latency("time_to_first_token"), latency("inter_token_latency"), latency("request_latency"))


def _of_vllm(said: Mapping[str, Any]) -> Record:
    def latency(name: str) -> Latency:
        shares = [said.get(f"{share}_{name}_ms") for share in ("mean", "median", "p95", "p99")]
        return _latency(shares, {"count": said["completed"]}, MS)

    return Record("vllm bench", latency("ttft"), latency("tpot"), latency("e2el"))


def _latency(shares: Sequence[float | None], found: Mapping[str, Any], unit: float) -> Latency:
    """`shares`: mean, median, and the 95th and 99th percentile, in `unit` seconds."""
    mean, p50, p95, p99 = (None if value is None else unit * value for value in shares)
    return Latency(mean, p50, p95, p99, int(found.get("count") or 0))


_TOOLS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], Record]], ...] = (
    (lambda said: "benchmarks" in said, _of_guidellm),
    (lambda said: "unit" in (said.get("request_latency") or ()), _of_aiperf),
    (lambda said: "mean_ttft_ms" in said, _of_vllm),
)

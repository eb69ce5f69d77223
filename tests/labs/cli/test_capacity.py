"""The capacity part of `sluice plan`."""

import json
from pathlib import Path

import pytest

from labs.cli import capacity
from labs.simulation.search import replicas
from labs.simulation.search.replicas import Replica
from tests.gateway.cli.conftest import Printed, Sluice

RECORDED = Path(__file__).parents[1] / "core" / "recorded"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    entries = [{"timestamp": 90 * n, "input_length": 300 + 9 * n, "output_length": 40 + n % 9} for n in range(100)]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


@pytest.fixture(autouse=True)
def one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further one takes as many simulations."""
    monkeypatch.setattr(replicas, "SEEDS", (1,))


def test_a_trace_becomes_lengths_replicas_and_cost(
    trace: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "SENSITIVITIES", {"answers": Replica.with_answers})  # each takes a dozen simulations
    flags = ["--gpu", "h100", "--trace", trace, "--rate", 100_000, "--ttft", "2s", "--price", "3.50/h"]
    flags += ["--bandwidth", "300MB", "--flops", "0.02T", "--per-token", "1s"]
    out = printed("plan", "embedded", *flags, "--requests", 20)
    lines = {line.split("  ")[0]: line.split("  ") for line in out.splitlines()}
    assert lines["prompt"][-1].strip() == "1,191" and lines["answer"][-1].strip() == "48"
    assert "--max-model-len 2048, all that the model has, holds 100.0 % of them" in out
    number, gpus = (int(next(filter(None, lines[name][1:])).replace(",", "")) for name in ("replicas", "GPUs"))
    assert number == gpus > 1
    assert "a million answer tokens, prompts included" in out
    changed = lines["requests a second"]
    fewer, more = (int(cell.replace(",", "")) for cell in changed[1:] if cell.strip())
    assert fewer < number < more and abs(more / number - 1.2) < 0.2


@pytest.mark.nightly
def test_a_recorded_server_takes_the_place_of_the_roofline(
    trace: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a recording its settings count: prompts that its context does not hold are refused."""
    monkeypatch.setattr(capacity, "SENSITIVITIES", {})
    entries = [{"timestamp": 90 * n, "input_length": 9 + 9 * (n % 9), "output_length": 9} for n in range(50)]
    trace.write_text("\n".join(map(json.dumps, entries)))
    flags = ["--trace", trace, "--rate", 100, "--ttft", "2s", "--per-token", "1s", "--requests", 20]
    out = printed("plan", "embedded", *flags, "--device", RECORDED / "cancels.log.gz")
    assert "planned here is" in out and "a replica's knee" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "5"], "give --trace"),
        (["--trace", "TRACE", "--rate", "5"], "needs --rate and --ttft"),
        (["--trace", "TRACE", "--rate", "5", "--ttft", "1s", "--max-model-len", "128"], "no request of the trace fits"),
        (["--trace", "TRACE", "--rate", "0", "--ttft", "1s"], "above zero"),
        (["--trace", "TRACE", "--rate", "5", "--ttft", "1s", "--price", "cheap"], "no price such as 3.50/h"),
        (["--trace", "TRACE", "--rate", "5", "--ttft", "0s"], "'0s' must be above zero"),
        (["--trace", "TRACE", "--rate", "5", "--ttft", "1s", "--requests", "1B"], "'1B' is not within 1 and 100k"),
        (["--trace", "none.csv", "--rate", "5", "--ttft", "1s"], "cannot be read"),
        (["--columns", "time=at"], "give --trace"),
        (["--columns", "when=at"], "argument --columns: there is no field when"),
        (["--trace", "TRACE", "--rate", "5", "--ttft", "1s", "--columns", "time=at"], "is no table"),
        (["--trace", "TRACE", "--rate", "5", "--ttft", "1s", "--device", "TRACE"], "is no event log"),
        (["--device", "TRACE"], "give --trace"),
    ],
)
def test_what_cannot_be_planned_is_refused(trace: Path, sluice: Sluice, flags: list[str], message: str) -> None:
    done = sluice("plan", "embedded", *(str(trace) if flag == "TRACE" else flag for flag in flags))
    assert done.status == 2 and message in done.err


def test_a_target_that_nothing_meets_is_refused(trace: Path, sluice: Sluice) -> None:
    flags = ["--trace", trace, "--rate", 5, "--ttft", "1ms", "--requests", 20, "--bandwidth", "1MB"]
    done = sluice("plan", "embedded", *flags)
    assert done.status == 2 and "no rate meets it" in done.err

import re

import pytest

from labs.benchmarks.fresh import MARK, Cached, Fresh, check_nothing_was_cached
from labs.benchmarks.load import post
from labs.benchmarks.processes import ROOT
from tests.gateway.server_process import ServerProcess, running_server

STARTED = r"(?<![\w.])(?<!def )(?:LLM|load_model|gateway_process|served|served_afresh)\("
ENGINES = re.compile(STARTED + r"|\"labs.benchmarks.gateway_server\"")
CHECKS = re.compile(
    r"check_nothing_was_cached\(|served_afresh\(|\"prefix_cache\": \"off\"|telemetry_cost import .*\bmeasure\b"
)
UNCHECKED = {
    "measures the cache itself": {"cache_isolation", "prefix_cache", "routing_live"},
    "measures no time": {"batch_invariance", "batch_kills", "json_schemas"},
    "has prompts of less than a block": {"embeddings", "structured"},
    "takes what was cached off its figures": {"preemption_live"},
    "times steps without a scheduler": {"adapters"},
    "compares the requests of a log with themselves": {"what_if_live"},
    "begins every run with an empty cache": {"speculation"},
    "times a server that caches, beside a plan that does": {"plan_live"},
}


def test_every_benchmark_that_times_an_engine_sees_that_prompts_were_computed() -> None:
    sources = {path.stem: path.read_text() for path in (ROOT / "labs" / "benchmarks").glob("*.py")}
    timed = {name for name, source in sources.items() if ENGINES.search(source)}
    unchecked = {name for name in timed if not CHECKS.search(sources[name])}
    assert unchecked == set[str]().union(*UNCHECKED.values())


def test_no_request_is_as_another_and_all_have_the_length_that_they_announce() -> None:
    body = {"prompt": f"{MARK}: tell me", "again": MARK}
    one, other = Fresh(post("/path", body)), Fresh(post("/path", body))
    asked = [next(requests) for requests in (one, other, one, other)]
    assert len(set(asked)) == 4
    for request in asked:
        head, _, content = request.partition(b"\r\n\r\n")
        assert f"content-length: {len(content)}".encode() in head
        assert MARK.encode() not in request


def test_a_request_without_a_mark_is_none() -> None:
    with pytest.raises(AssertionError, match="no ########"):
        Fresh(post("/path", {"prompt": "the same again"}))


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["0", "1"])
def test_tokens_that_were_found_in_a_cache_are_told(tmp_path_factory: pytest.TempPathFactory, workers: str) -> None:
    flags = ("--threads", "1", "--metrics-on-tenant-port", "--http-workers", workers)
    with running_server(tmp_path_factory.mktemp("fresh"), *flags) as server:
        for number in range(2):
            ask(server, f"{number} is a number that nobody has said before, and what comes now is a prompt.")
        check_nothing_was_cached(server.port)
        ask(server, "1 is a number that nobody has said before, and what comes now is a prompt.")
        with pytest.raises(Cached, match="tokens of prompts were found"):
            check_nothing_was_cached(server.port)


def ask(server: ServerProcess, prompt: str) -> None:
    assert server.post("/v1/completions", model="embedded", prompt=prompt, max_tokens=1).status_code == 200

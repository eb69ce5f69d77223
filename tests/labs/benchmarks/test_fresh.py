import pytest

from labs.benchmarks.fresh import MARK, Cached, Fresh, check_nothing_was_cached
from labs.benchmarks.load import post
from tests.gateway.server_process import ServerProcess, running_server


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

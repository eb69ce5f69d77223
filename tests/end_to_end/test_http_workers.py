"""A server with HTTP workers answers as one without, and outlives whichever of its processes is killed."""

import json
import os
import random
import re
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli import main as cli
from gateway.telemetry.event_log_file import read_event_log
from tests.examples import examples
from tests.gateway.http_workers import children, clients_of_each, is_running, workers
from tests.gateway.raw_client import RawClient, Reply, chat, completion, connected, request
from tests.gateway.server_process import ServerProcess, eventually
from tests.gateway.tenant_site import TenantSite, tenant_site

NUM_WORKERS = 2
POLICY = """
tenants:
  acme: {limits: {tokens: 10M/month, requests: {rate: 1/h, burst: 1000}, concurrent_requests: 100}}
  spent: {limits: {requests: {rate: 1/h, burst: 1}}}
  revoked: {}
  edited: {}
"""
EDITED = POLICY.replace("edited: {}", "edited: {models: [none]}")
STREAM = completion(ignore_eos=True, stream=True)
ENDLESS = STREAM | {"prompt": [[5, 6, 7]] * 8, "max_tokens": 1900}  # lasts for longer than what is done meanwhile


class Site(TenantSite):
    def raw(self, tenant: str, body: object, path: str = "/v1/completions", **headers: str) -> bytes:
        return request(self.server, body, path, **self.authorization(tenant), **headers)


def flags(num_workers: int) -> tuple[str, ...]:
    return "--http-workers", str(num_workers), "--refused-per-second", "10000"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with tenant_site(Site, tmp_path_factory.mktemp("workers"), POLICY, *flags(NUM_WORKERS)) as site:
        yield site


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All in one process."""
    with tenant_site(Site, tmp_path_factory.mktemp("undivided"), POLICY, *flags(0)) as site:
        assert workers(site.server) == []
        yield site


# what clients see

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
EXCHANGES: dict[str, tuple[str, object]] = {
    "chat": ("/v1/chat/completions", chat(**GREEDY)),
    "chat, streamed": ("/v1/chat/completions", chat(**GREEDY, stream=True)),
    "chat, streamed with usage": ("/v1/chat/completions", chat(**SAMPLED, **USAGE)),
    "chat with a stop string": ("/v1/chat/completions", chat(**GREEDY, stop=["7, 8"])),
    "chat with a stop string, streamed": ("/v1/chat/completions", chat(**GREEDY, **USAGE, stop=["7, 8", "none"])),
    "chat with a stop string that is kept": (
        "/v1/chat/completions",
        chat(**GREEDY, stream=True, stop="5", include_stop_str_in_output=True),
    ),
    "completion": ("/v1/completions", completion(**SAMPLED)),
    "completions of several prompts": ("/v1/completions", completion(prompt=["1, 2,", "Hi", "3"], **SAMPLED)),
    "completions of tokens": ("/v1/completions", completion(prompt=[[5, 6], [7]], **SAMPLED, stop=["e", "7"])),
    "several answers": ("/v1/completions", completion(n=2, **SAMPLED)),
    "a prompt under a salt": ("/v1/completions", completion(prompt=[[5] * 40], max_tokens=1, cache_salt="mine")),
    "a token": ("/v1/completions", completion(max_tokens=1, **USAGE)),
    "no such model": ("/v1/completions", completion(model="none")),
    "a wrong field": ("/v1/completions", completion(temperature=-1)),
    "a field with a lone surrogate": ("/v1/completions", rb'{"model": "embedded", "\ud800": 1, "prompt": "1"}'),
    "more than the context leaves": ("/v1/completions", completion(prompt=[5] * 2040, max_tokens=10**6)),
    "too long": ("/v1/completions", completion(prompt=[5] * 2049)),
    "not JSON": ("/v1/chat/completions", b"no"),
    "tokenize": ("/tokenize", {"prompt": "1, 2, 3"}),
    "tokenize a chat": ("/tokenize", {"messages": chat()["messages"]}),
    "detokenize": ("/detokenize", {"tokens": [5, 6, 7, 8]}),
    "detokenize what is none": ("/detokenize", {"tokens": [-5]}),
    "no such path": ("/v1/nothing", {}),
    "another method": ("/v1/models", {}),
}
OTHERS = ("/v1/models", "/v1/models/embedded", "/v1/models/none", "/version", "/v1/limits", "/livez", "/startupz")
CHANGING = re.compile(r"date|x-request-id|x-sluice-estimate-.*|x-ratelimit-reset-.*|content-length")


def told(reply: Reply) -> tuple[int, dict[str, str], bytes]:
    """What a client is told, but for ids and times."""
    headers = {name: value for name, value in reply.headers.items() if not CHANGING.fullmatch(name)}
    headers["ratelimit"] = re.sub(r";t=\d+", "", headers.get("ratelimit", ""))
    headers["allow"] = ", ".join(sorted(headers.get("allow", "").split(", ")))
    body = re.sub(rb'"(chat)?cmpl-\w+"', b'"id"', reply.body.replace(b"HEAD, GET", b"GET, HEAD"))
    return reply.status, headers, re.sub(rb'"(created|reset\w*|resets_at|set_aside)":[\d.]+', rb'"\1":0', body)


def ask(site: Site, path: str, body: object) -> Reply:
    with connected(site.server) as client:
        client.send(site.raw("acme", body, path))
        return client.reply()


def look(site: Site, path: str) -> Reply:
    with connected(site.server) as client:
        authorization = site.authorization("acme")["authorization"]
        client.send(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {authorization}\r\n\r\n".encode())
        return client.reply("GET")


@pytest.fixture(scope="module")
def exchanged(site: Site, undivided: Site) -> dict[str, tuple[Reply, Reply]]:
    """The same, one after the other, at both."""
    exchanges = {name: (ask(site, *one), ask(undivided, *one)) for name, one in EXCHANGES.items()}
    return exchanges | {path: (look(site, path), look(undivided, path)) for path in OTHERS}


@pytest.mark.parametrize("name", [*EXCHANGES, *OTHERS])
def test_an_answer_is_that_of_one_process(exchanged: dict[str, tuple[Reply, Reply]], name: str) -> None:
    mine, other = exchanged[name]
    assert told(mine) == told(other)
    assert mine.status < 500


def texts(reply: Reply) -> tuple[dict[int, str], list[Any]]:
    """The text of each choice of a stream, and all usages."""
    pieces: dict[int, str] = {}
    usages = []
    for line in filter(None, reply.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")):
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
        usages.append(event.get("usage"))
    return pieces, usages


def test_streams_of_several_prompts_have_the_same_texts_and_usage(site: Site, undivided: Site) -> None:
    """Which comes first is a matter of when tokens are written."""
    body = completion(prompt=["1, 2,", "Hi", "3"], **SAMPLED, **USAGE)
    mine, other = (texts(ask(one, "/v1/completions", body)) for one in (site, undivided))
    assert mine[0] == other[0] and len(mine[0]) == 3
    assert mine[1][-1] == other[1][-1]
    assert mine[1][-1]["completion_tokens"] == 120
    continuous = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    mine, other = (texts(ask(one, "/v1/completions", body | continuous)) for one in (site, undivided))
    assert (mine[0], mine[1][-1]) == (other[0], other[1][-1])
    assert all(mine[1])


# what operators see


FIRST = "vllm:time_to_first_token_seconds_count"
COUNTED = ("sluice_requests_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total", FIRST)


def test_all_workers_are_looked_at_as_one(site: Site) -> None:
    server = site.server
    before = {name: server.metric(name) for name in COUNTED}
    with clients_of_each(server, 2) as clients:
        for client in [client for its in clients.values() for client in its]:
            client.send(site.raw("acme", completion(max_tokens=20, ignore_eos=True)))
        for client in [client for its in clients.values() for client in its]:
            usage = json.loads(client.reply().body)["usage"]
        eventually(server.is_idle)
        counted = {name: server.metric(name) - before[name] for name in COUNTED}
        requests = 2 * NUM_WORKERS
        assert counted["sluice_requests_total"] == requests
        assert counted["vllm:generation_tokens_total"] == 20 * requests
        assert counted["vllm:prompt_tokens_total"] == requests * usage["prompt_tokens"]
        # workers report latencies and connections every second
        eventually(lambda: server.metric("vllm:time_to_first_token_seconds_count") - before[FIRST] >= requests)
        eventually(lambda: server.metric("sluice_connections") >= requests)
    assert server.metric("sluice_http_workers") == NUM_WORKERS == len(workers(server))


def test_a_running_request_is_seen_and_cancelled_on_any_worker(site: Site) -> None:
    server = site.server
    with clients_of_each(server) as clients:
        for number, (client,) in enumerate(clients.values()):
            trace = f"{number + 1:032x}"
            client.send(site.raw("acme", ENDLESS, traceparent=f"00-{trace}-00000000000000aa-01"))
            assert client.receive().startswith(b"HTTP/1.1 200")
            (row,) = server.admin("requests")["live"]
            assert (row["tenant"], row["state"], row["max_tokens"]) == ("acme", "decoding", 8 * 1900)
            assert server.admin(f"requests/{row['id']}/cancel", "POST") == {"cancelled": True}
            received = b""
            while b"cancelled" not in received:
                received += client.receive()
            assert received.endswith(b"0\r\n\r\n") and b"[DONE]" not in received
            eventually(server.is_idle)
            shown = server.admin(f"requests/{row['id']}")
            assert (shown["outcome"], shown["code"]) == ("failed", "cancelled")
            eventually(partial(is_logged, server, trace, row["id"]))
    eventually(lambda: site.limits("acme")["concurrent_requests"]["remaining"] == 100)


def is_logged(server: ServerProcess, *words: str) -> bool:
    """Whether one line of the log has all of these."""
    return any(all(word in line for word in words) for line in server.log.read_text().splitlines())


# edits and refusals


def test_a_revoked_key_and_an_edited_policy_hold_everywhere_once_the_admin_is_told(site: Site) -> None:
    server = site.server
    with clients_of_each(server) as clients:
        every = [client for (client,) in clients.values()]
        (row,) = [row for row in server.admin("keys")["keys"] if row["tenant"] == "revoked"]
        assert statuses(site, every, "revoked") == [200] * NUM_WORKERS
        assert server.admin(f"keys/{row['id']}/revoke", "POST") == {"revoked": True}
        assert statuses(site, every, "revoked") == [401] * NUM_WORKERS
        assert statuses(site, every, "edited") == [200] * NUM_WORKERS
        site.policy.write_text(EDITED)
        server.admin("policy/reload", "POST")
        assert statuses(site, every, "edited") == [404] * NUM_WORKERS
        site.policy.write_text(POLICY)
        server.admin("policy/reload", "POST")
        assert statuses(site, every, "edited") == [200] * NUM_WORKERS


def statuses(site: Site, clients: list[RawClient], tenant: str) -> list[int]:
    for client in clients:
        client.send(site.raw(tenant, completion(max_tokens=1)))
    return [client.reply().status for client in clients]


def test_a_key_whose_limit_is_spent_is_refused_unread_by_every_worker(site: Site) -> None:
    assert [site.post("spent", max_tokens=1).status_code for _ in range(2)] == [200, 429]
    with clients_of_each(site.server) as clients:
        for (client,) in clients.values():
            client.send(site.raw("spent", b"", content_length="1000"))
            reply = client.reply()
            assert (reply.status, reply.error["limit"]) == (429, "requests/h")


# clients that leave, and hostile ones


def test_a_client_that_leaves_a_worker_frees_its_memory(site: Site) -> None:
    server, released = site.server, "sluice_disconnect_to_release_seconds_count"
    before, generated = server.metric(released), server.metric("vllm:generation_tokens_total")
    with clients_of_each(server) as clients:
        for (client,) in clients.values():
            client.send(site.raw("acme", ENDLESS))
            assert client.receive().startswith(b"HTTP/1.1 200")
        for (client,), leave in zip(clients.values(), (RawClient.close, RawClient.reset), strict=True):
            leave(client)
    eventually(lambda: server.metric(released) >= before + NUM_WORKERS)
    assert_left_nothing(site)
    assert server.metric("vllm:generation_tokens_total") - generated < 8 * 1900 * NUM_WORKERS


def assert_left_nothing(site: Site) -> None:
    eventually(site.server.is_idle)
    eventually(lambda: site.limits("acme")["concurrent_requests"]["remaining"] == 100)  # settled beside the answers
    assert len(workers(site.server)) == NUM_WORKERS
    assert site.server.metric("sluice_http_worker_restarts_total") == 0
    log = site.server.log.read_text()
    assert "Traceback" not in log and "ERROR" not in log


def test_a_storm_of_clients_that_leave_leaves_nothing(site: Site) -> None:
    rng = random.Random(3)

    def leave() -> None:
        raw = site.raw("acme", random_body(rng))
        share = rng.choice((0.3, 0.9, 1.0, 1.0, 1.0))
        client = RawClient(site.server)
        client.send(raw[: int(len(raw) * share)])
        if share == 1.0 and rng.random() < 0.5:
            client.receive(200)
        rng.choice((RawClient.close, RawClient.reset, RawClient.shut))(client)
        client.close()

    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(leave) for _ in range(examples(60))]:
            one.result()
    assert_left_nothing(site)
    assert site.post("acme", max_tokens=1).status_code == 200


def random_body(rng: random.Random) -> dict[str, object]:
    prompts = [[rng.randrange(2, 1000)] * rng.randint(1, 200) for _ in range(rng.choice((1, 1, 3)))]
    stop = {"stop": ["e", "7"]} if rng.random() < 0.3 else {}
    return completion(
        prompt=prompts, max_tokens=rng.randint(1, 800), ignore_eos=True, stream=rng.random() < 0.6, **stop
    )


def test_a_fuzz_of_requests_leaves_nothing(site: Site) -> None:
    fuzz(site, 300)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_long_fuzz_of_requests_leaves_nothing(site: Site) -> None:
    fuzz(site, 20_000)


def fuzz(site: Site, count: int) -> None:
    """Requests that were right before bytes of them were changed: each gets an answer, or the end of its connection."""
    usual = [site.raw("acme", body, path) for path, body in EXCHANGES.values()]

    def send(seed: int) -> None:
        rng = random.Random(seed)
        with connected(site.server) as client:
            with suppress(ConnectionError):  # it may have been turned away before it has sent all
                client.send(mutated(rng, rng.choice(usual)))
                client.shut()
            assert b"HTTP/1.1 5" not in rest(client)

    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(send, seed) for seed in range(count)]:
            one.result()
    assert_left_nothing(site)
    assert site.post("acme", max_tokens=1).status_code == 200


def mutated(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place, size = rng.randrange(len(changed)), rng.choice((1, 1, 1, 2, 8, 60))
        match rng.randrange(4):
            case 0:
                changed[place : place + size] = rng.randbytes(size)
            case 1:
                del changed[place : place + size]
            case 2:
                changed[place:place] = rng.choice((b"0", b'"', b"[", b"{", b"\\ud800", b"-", b"\r\n", b"\x00", b"1e9"))
            case _:
                changed[place:place] = changed[place : place + size]
    return bytes(changed)


def rest(client: RawClient) -> bytes:
    """All that the server still says until it closes."""
    parts = []
    with suppress(ConnectionResetError):
        while part := client.receive():
            parts.append(part)
    return b"".join(parts)


# processes that end


def begin(site: Site, clients: Iterable[RawClient], body: object) -> None:
    """Have each client read a stream."""
    for client in clients:
        client.send(site.raw("acme", body))
    for client in clients:
        assert client.receive().startswith(b"HTTP/1.1 200")


def terminate_all(server: ServerProcess) -> None:
    """As a terminal or a supervisor does that signals the whole process group."""
    for pid in (server.process.pid, *children(server)):
        if os.getpgid(pid) == os.getpgid(server.process.pid):
            os.kill(pid, signal.SIGTERM)


def test_a_worker_is_killed_and_only_its_own_clients_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "events.log"
    with tenant_site(Site, tmp_path, POLICY, *flags(NUM_WORKERS), f"--event-log={log}") as site:
        server = site.server
        with clients_of_each(server, 3) as clients:
            killed, kept = clients
            begin(site, clients[killed], ENDLESS)
            begin(site, clients[kept], STREAM | {"max_tokens": 250})
            os.kill(killed, signal.SIGKILL)
            for client in clients[killed]:
                assert b"[DONE]" not in rest(client)
            for client in clients[kept]:
                client.shut()
                assert rest(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        eventually(server.is_idle)
        assert server.metric("sluice_requests_total", 'outcome="failed"') == 3
        assert server.metric("sluice_requests_total", 'outcome="completed"') == 3
        eventually(lambda: len(workers(server)) == server.metric("sluice_http_workers") == NUM_WORKERS)
        assert server.metric("sluice_http_worker_restarts_total") == 1
        eventually(lambda: site.limits("acme")["concurrent_requests"]["remaining"] == 100)
        used = 10_000_000 - site.limits("acme")["tokens"]["remaining"]
        assert 3 * 250 < used < 3 * 250 + 3 * 8 * 1900, "of the killed worker's, what was computed is paid and no more"
        with clients_of_each(server) as clients:  # also the one that came after
            begin(site, [client for (client,) in clients.values()], STREAM | {"max_tokens": 250})
            started = children(server)
            terminate_all(server)
            for (client,) in clients.values():
                assert rest(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        eventually(lambda: server.process.poll() == 0)
        assert not any(map(is_running, started))
        assert "Traceback" not in server.log.read_text()
    assert cli.main(["replay", "--log", str(log)]) == 0
    assert f"{sum(1 for _ in read_event_log(log)):,} entries reproduced" in capsys.readouterr().out


def test_the_first_signal_drains_every_worker_and_the_second_ends_what_is_left(tmp_path: Path) -> None:
    with tenant_site(Site, tmp_path, POLICY, *flags(NUM_WORKERS)) as site:
        server = site.server
        with clients_of_each(server) as clients:
            begin(site, [client for (client,) in clients.values()], ENDLESS)
            started = children(server)
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            assert httpx.get(f"{server.url}/livez").status_code == 200
            refused = site.post("acme", max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            server.process.send_signal(signal.SIGTERM)
            for (client,) in clients.values():
                received = rest(client)
                assert b"shutting_down" in received and b"[DONE]" not in received
        eventually(lambda: server.process.poll() == 0)
        assert not any(map(is_running, started))
        assert "Traceback" not in server.log.read_text()


def test_workers_and_their_clients_are_not_left_behind_by_an_engine_that_is_killed(tmp_path: Path) -> None:
    with tenant_site(Site, tmp_path, POLICY, *flags(NUM_WORKERS)) as site:
        started = workers(site.server)
        with clients_of_each(site.server) as clients:
            begin(site, [client for (client,) in clients.values()], ENDLESS)
            site.server.process.kill()
            for (client,) in clients.values():
                assert b"[DONE]" not in rest(client)
        eventually(lambda: not any(map(is_running, started)))

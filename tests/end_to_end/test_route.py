"""Two real replicas behind a real router, asked by the official client."""

import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionMessageParam
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fleet.ext_proc.server import SERVING
from tests.fleet.ext_proc_gateway import body, head
from tests.fleet.fleet_site import FleetSite, fleet_site
from tests.fleet.picker_process import answers, health, running_picker
from tests.gateway.server_process import BODY, PATIENCE, bearer, eventually
from tests.gateway.telemetry.otlp_receiver import Receiver, otlp_receiver, plain

# `closed`: a part of a limit that one replica's heartbeat sets aside for outages is nothing that another may spend.
POLICY = """
tenants:
  acme: {on_store_outage: closed, limits: {requests: 1000/month, concurrent_requests: 100}}
  spent: {on_store_outage: closed, limits: {requests: 5/month}}
"""
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from 3 to 12."}]
PAGE = "http://127.0.0.1:1/"
PROVIDER = ("--oidc-issuer", "http://127.0.0.1:1/", "--oidc-client-id", "router", "--oidc-role", "viewer=*")
SIGN_IN = (*PROVIDER, "--admin-url", PAGE) if find_spec("joserfc") else ()
LONG = BODY | {"max_tokens": 1900, "n": 8, "ignore_eos": True, "stream": True}


@contextmanager
def streaming(site: FleetSite) -> Iterator[httpx.Response]:
    """A long answer, as it comes through the router; the client leaves at the end of the block."""
    url, headers = f"{site.url}/v1/chat/completions", bearer(site.keys["acme"])
    with httpx.stream("POST", url, json=LONG, headers=headers, timeout=PATIENCE) as response:
        assert response.status_code == 200
        yield response


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[FleetSite]:
    collector = ("--otlp-endpoint", receiver.grpc_endpoint)
    patient = ("--redis-timeout", "10")  # on a busy machine the store is slow, and not away
    route = (*collector, *SIGN_IN)
    with fleet_site(tmp_path_factory.mktemp("fleet"), POLICY, *patient, *collector, route=route) as site:
        yield site


@pytest.mark.skipif(not SIGN_IN, reason="no joserfc here: the extra oidc")
def test_admins_sign_in_at_a_provider_on_the_routers_page_too(site: FleetSite) -> None:
    with httpx.Client(base_url=site.admin_url) as browser:
        assert browser.get("/oidc/session").json() == {"offered": True, "key": None}
        assert browser.get("/oidc/login").headers["location"] == f"{PAGE}?problem=unavailable", "nobody answers there"


def test_a_stream_is_the_replicas_own(site: FleetSite) -> None:
    texts = []
    for url in (site.url, site.replicas[0].url):
        chunks = site.client("acme", url).chat.completions.create(
            model="embedded", messages=MESSAGES, stream=True, temperature=0, stream_options={"include_usage": True}
        )
        texts.append([(chunk.choices, chunk.usage) for chunk in chunks])
    text = "".join(choice.delta.content or "" for choices, _ in texts[0] for choice in choices)
    assert "10, 11, 12" in text
    assert [*map(repr, texts[0])] == [*map(repr, texts[1])]


def test_a_batch_goes_through_it_and_any_replica_knows_it(site: FleetSite) -> None:
    client = site.client("acme")
    body = {"model": "embedded", "prompt": "One, two,", "max_tokens": 4}
    asked = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(4)]
    file = client.files.create(file=("in.jsonl", b"\n".join(map(orjson.dumps, asked))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
    for replica in site.replicas:
        direct = site.client("acme", replica.url)
        eventually(lambda direct=direct: direct.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    output = client.files.content(done.output_file_id).text.splitlines()
    assert [orjson.loads(one)["custom_id"] for one in output] == ["0", "1", "2", "3"]
    assert client.files.delete(file.id).deleted and [one.id for one in client.batches.list()] == [batch.id]
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)
    lines = b"\n".join([orjson.dumps(asked[0] | {"custom_id": str(n)}) for n in range(40_000)])
    large = client.files.create(file=("in.jsonl", lines), purpose="batch")
    assert len(lines) > 4 * 2**20 and client.files.content(large.id).read() == lines


def test_each_dialect_goes_through_it(site: FleetSite) -> None:
    client = site.client("acme")
    asked: Any = {"model": "embedded", "input": "Count from 3 to 12.", "temperature": 0}
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == client.responses.create(**asked).output_text
    talk = client.conversations.create(items=[{"role": "system", "content": "Be exact."}])
    behind = client.responses.create(**asked, background=True, conversation=talk.id)
    for replica in site.replicas:
        direct = site.client("acme", replica.url).responses
        eventually(lambda direct=direct: direct.retrieve(behind.id).status == "completed")
    (first, *_) = client.conversations.items.list(talk.id).data
    assert client.conversations.items.retrieve(first.id, conversation_id=talk.id) == first
    with client.responses.create(**asked, background=True, stream=True) as begun:
        event = next(begun)
    assert event.type == "response.created"
    with client.responses.retrieve(event.response.id, stream=True, starting_after=0) as rest:
        *_, last = rest
    assert last.type == "response.completed" and "10, 11, 12" in last.response.output_text
    key = {"x-api-key": site.keys["acme"]}
    body = BODY | {"max_tokens": 60, "temperature": 0}
    whole, events = (
        httpx.post(f"{site.url}/v1/messages", json=body | {"stream": streams}, headers=key, timeout=PATIENCE)
        for streams in (False, True)
    )
    read = [orjson.loads(event.split("data: ", 1)[1]) for event in events.text.split("\n\n") if "data: " in event]
    text = "".join([event["delta"]["text"] for event in read if event["type"] == "content_block_delta"])
    assert [{"type": "text", "text": text}] == whole.json()["content"] and "10, 11, 12" in text
    usage = whole.json()["usage"]
    counted = httpx.post(f"{site.url}/v1/messages/count_tokens", json=BODY, headers=key, timeout=PATIENCE).json()
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_requests_go_to_every_replica_and_a_prompt_to_its_cache(site: FleetSite) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = [*pool.map(lambda _: site.post("acme", **BODY), range(24))]
    assert {reply.status_code for reply in replies} == {200}
    assert min(site.attempts()) > 0
    eventually(lambda: not any(one["state"]["running"] for one in site.report().values()))

    found = 0
    for number in range(8):
        turns = [{"role": "system", "content": "Be exact. " * 120}, {"role": "user", "content": f"{number} + 1?"}]
        usage = site.post("acme", model="embedded", messages=turns, max_tokens=4).json()["usage"]
        found += usage["prompt_tokens_details"]["cached_tokens"] > 200
    assert found >= 8 - len(site.replicas), "a replica computes it once"
    told = [one.admin("state")["beginnings"]["cached"] for one in site.replicas]
    assert any(told), "and tells routers that it has it"
    asked = [one.admin(f"state?since={one.admin('state')['beginnings']['next']}") for one in site.replicas]
    assert not any(one["beginnings"]["cached"] for one in asked)


def test_a_trace_goes_from_the_client_by_way_of_the_router_to_the_replica(site: FleetSite, receiver: Receiver) -> None:
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace}-{parent}-01", "tracestate": "vendor=1", **bearer(site.keys["acme"])}
    httpx.post(f"{site.url}/v1/chat/completions", json=BODY, headers=headers, timeout=PATIENCE).raise_for_status()

    def spans() -> dict[str, Span]:
        return {span.name: span for span in receiver.spans if span.trace_id.hex() == trace}

    eventually(lambda: {"route", "attempt", "POST /v1/chat/completions"} <= spans().keys())
    route, attempt, served = map(spans().get, ("route", "attempt", "POST /v1/chat/completions"))
    assert route and attempt and served
    assert (route.kind, attempt.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert route.parent_span_id.hex() == parent
    assert (attempt.parent_span_id, served.parent_span_id) == (route.span_id, attempt.span_id)
    assert {span.trace_state for span in (route, attempt, served)} == {"vendor=1"}
    assert route.start_time_unix_nano <= attempt.start_time_unix_nano <= served.start_time_unix_nano
    told = plain(attempt.attributes)
    assert told["sluice.route.replica"] in site.report()
    assert told["sluice.route.predicted_ms"] > 0
    assert plain(route.attributes)["sluice.tenant.id"] == "acme"


def test_a_client_that_leaves_frees_its_memory_on_the_replica(site: FleetSite) -> None:
    with streaming(site) as response:
        assert b"chat.completion.chunk" in next(response.iter_raw())
    eventually(site.are_idle)
    assert sum(one.metric("sluice_requests_total", 'outcome="disconnected"') for one in site.replicas) == 1


def test_limits_hold_over_all_replicas_and_a_tenants_own_refusal_is_final(site: FleetSite) -> None:
    before = site.metric("sluice_route_retries_total")
    with ThreadPoolExecutor(8) as pool:
        replies = [*pool.map(lambda _: site.post("spent", **BODY, max_tokens=4), range(12))]
    assert sorted(reply.status_code for reply in replies) == [200] * 5 + [429] * 7
    assert {reply.json()["error"]["code"] for reply in replies if reply.status_code == 429} == {"insufficient_quota"}
    assert site.metric("sluice_route_retries_total") == before


def test_the_router_opens_for_the_keys_of_the_replicas(site: FleetSite) -> None:
    assert [one.id for one in site.client("acme").models.list()] == ["embedded"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{site.url}/v1", api_key="sk-sluice-none", max_retries=0).models.list()
    for path in ("/livez", "/readyz", "/health"):
        assert httpx.get(site.url + path).status_code == 200
    admin = f"{site.admin_url}/admin/v1/fleet"
    assert httpx.get(admin, headers=bearer(site.keys["acme"])).status_code == 401


def test_the_set_of_replicas_changes_while_it_routes(site: FleetSite) -> None:
    gone, left = site.replicas
    try:
        site.write([left])
        eventually(lambda: len(site.report()) == 1)
        assert site.post("acme", **BODY).status_code == 200
        (site.folder / "replicas.yaml").write_text("replicas: [")
        eventually(lambda: "the replicas stay as they were" in (site.folder / "router.err").read_text())
        assert site.post("acme", **BODY).status_code == 200
    finally:
        site.write([gone, left])
    eventually(lambda: site.available() == 2)


def test_a_gateways_second_attempt_takes_back_what_the_first_has_charged(site: FleetSite) -> None:
    key, request = site.keys["acme"], orjson.dumps(LONG)

    def left() -> int:
        limits = httpx.get(f"{site.url}/v1/limits", headers=bearer(key), timeout=PATIENCE).json()["data"]
        return next(int(limit["remaining"]) for limit in limits if limit["resource"] == "requests")

    flags = ("--policy", str(site.folder / "policy.yaml"), "--state-dir", str(site.folder / "state"))
    with running_picker(site.folder, *flags) as channel:
        eventually(lambda: health(channel, "readiness") == SERVING)
        told = answers(channel, head(key=key), *body(request))
        subset = answers(channel, head(key=key, subset=[site.replicas[1].url[7:]]), *body(request))
    options = told[0].request_headers.response.header_mutation.set_headers
    headers = {option.header.key: option.header.raw_value.decode() for option in options}
    endpoints = headers.pop("x-gateway-destination-endpoint").split(",")
    assert sorted(endpoints) == sorted(one.url.removeprefix("http://") for one in site.replicas)
    assert told[1].request_body.response.body_mutation.streamed_response.body == request
    assert subset[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == site.replicas[1].url[7:]
    before = left()
    given = bearer(key) | headers
    with ExitStack() as open_streams:
        for endpoint in endpoints:
            url = f"http://{endpoint}/v1/chat/completions"
            stream = httpx.stream("POST", url, content=request, headers=given, timeout=PATIENCE)
            response = open_streams.enter_context(stream)
            assert response.headers["x-request-id"] == headers["x-request-id"]
            parts = response.iter_raw()
            open_streams.callback(parts.close)  # until then it is read on: without anybody the stream would end
            assert b"chat.completion.chunk" in next(parts)
    eventually(site.are_idle)
    eventually(lambda: left() == before - 1)  # it is settled behind its end


def test_a_request_not_begun_by_a_killed_replica_is_served_by_another_and_charged_once(
    tmp_path: Path, redis_url: str
) -> None:
    """Each replica has one seat. Of three streams two are being answered, and the third waits behind one of them."""
    flags = ("--max-num-seqs", "1", "--redis-url", redis_url, "--quota-lease", "3")

    def left() -> dict[str, int]:
        limits = httpx.get(f"{site.url}/v1/limits", headers=bearer(site.keys["acme"]), timeout=PATIENCE).json()["data"]
        return {limit["resource"]: int(limit["remaining"]) for limit in limits}

    with fleet_site(tmp_path, POLICY, *flags) as site, ExitStack() as open_streams:
        begun: dict[int, httpx.Response] = {}
        for _ in site.replicas:
            stream = open_streams.enter_context(streaming(site))
            place = next(index for index, count in enumerate(site.attempts()) if count and index not in begun)
            begun[place] = stream
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(lambda: open_streams.enter_context(streaming(site)))
            eventually(lambda: sum(site.attempts()) == 3)
            killed = site.attempts().index(2)
            site.replicas[killed].process.send_signal(signal.SIGKILL)
            end = b"".join(begun[killed].iter_raw())
            assert b'"code":"replica_lost"' in end
            assert b"[DONE]" not in end
            begun[1 - killed].close()
            assert b"chat.completion.chunk" in next(last.result().iter_raw())
        assert site.metric("sluice_route_retries_total") >= 1
        eventually(lambda: site.available() == 1)
        open_streams.close()
        eventually(lambda: left()["concurrent_requests"] == 100)  # the killed replica's lease is over
        assert left()["requests"] == 997


def test_a_replica_that_announces_itself_is_routed_to_until_it_drains(tmp_path: Path) -> None:
    """It has the private store of a state directory, in which the router finds it."""
    flags, route = ("--advertise", "http://127.0.0.1", "--drain-delay", "30"), ("--replicas-store", "embedded")
    with fleet_site(tmp_path, POLICY, *flags, count=1, route=route) as site:
        (replica,) = site.replicas
        assert [*site.report()] == [replica.url.removeprefix("http://")]
        assert site.post("acme", **BODY).status_code == 200
        replica.process.send_signal(signal.SIGTERM)
        eventually(lambda: not site.report())
        assert replica.answers(), "it serves on while balancers hear of it"
        assert site.post("acme", **BODY).json()["error"]["code"] == "no_replica"

"""Every message, with any text of clients, crosses a link unchanged."""

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import fields, replace
from math import inf
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.outcome import Outcome
from backend.grammar import Grammar, GrammarKind
from backend.sampling_params import SamplingParams
from gateway.api.engine_request import ClientDeadlines, EngineRequest
from gateway.errors import ApiError, BadRequest, DeadlineUnmeetable, MethodNotAllowed, RateLimited
from gateway.replica.fleet_secret import Beginnings
from gateway.telemetry.request_record import RequestRecord, TraceContext
from gateway.workers.link import FrameKind, frame
from gateway.workers.messages import (
    end,
    end_message,
    engine_request_of,
    error_message,
    error_of,
    record_message,
    record_of,
    request_message,
)
from gateway.workers.remote_request import RemoteRequest
from gateway.workers.token_ids import TOKENS_PER_TURN, pack, unpack
from quotas.reservation import Attempt


def crossed(message: Any) -> Any:
    """A message as the other end of a link reads it."""
    header, raw = 9, frame(FrameKind.ASK, message)
    return orjson.loads(raw[header:])


def whole(request: EngineRequest) -> tuple[EngineRequest, bytes]:
    """The request as the other end makes it, and the bytes of its token ids."""
    message = crossed(request_message(request))

    async def read() -> tuple[EngineRequest, bytes]:
        packed = await pack(request.prompts[:: request.num_answers])
        made, lengths = engine_request_of(message)
        await unpack(packed, made.prompts[:: made.num_answers], lengths)
        return made, packed

    return asyncio.run(read())


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
moments = st.floats(0, 1e9)
seconds = moments | st.just(inf)
token_ids = st.integers(0, 2**32 - 1)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**40),
    min_tokens=st.just(0),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(1, 1000),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 1023), max_size=4, unique=True).map(tuple),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, 1023), st.floats(-100, 100), max_size=3).map(lambda b: tuple(b.items())),
    allowed_token_ids=st.none()
    | st.sets(st.integers(0, 1023), min_size=1, max_size=4).map(lambda ids: (*sorted(ids),)),
    bad_words=st.lists(st.lists(st.integers(0, 1023), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), names, names),
)

digests = st.lists(st.binary(min_size=12, max_size=12), max_size=3).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    prompts = draw(st.lists(st.lists(token_ids, min_size=1, max_size=8), min_size=1, max_size=4))
    return EngineRequest(
        id=draw(names),
        tenant=draw(names),
        key=draw(names),
        prompts=prompts,
        max_tokens=[draw(st.integers(1, 10_000)) for _ in prompts],
        sampling=draw(samplings),
        service_tier=draw(st.none() | names),
        service_class=draw(names),
        priority_class=draw(st.integers(0, 9)),
        token_interval=draw(st.none() | moments),
        first_token_target=draw(st.none() | moments),
        first_token_by=draw(st.none() | moments),
        done_by=draw(st.none() | moments),
        deadlines=draw(st.builds(ClientDeadlines, seconds, seconds, seconds, st.booleans())),
        body_bytes=draw(st.integers(0, 2**40)),
        streams=draw(st.booleans()),
        may_stop=draw(st.booleans()),
        beginnings=draw(st.builds(Beginnings, digests, st.integers(0, 10**6))),
        attempt=draw(st.none() | st.builds(Attempt, names, st.integers(1, 9))),
    )


@given(requests())
def test_a_request_crosses_unchanged(request: EngineRequest) -> None:
    crossed_request, binary = whole(request)
    assert crossed_request == request
    assert len(binary) == 4 * sum(map(len, request.prompts)) == array("I").itemsize * sum(map(len, request.prompts))


@given(requests(), st.integers(2, 5))
def test_a_prompt_with_several_answers_crosses_once(request: EngineRequest, num_answers: int) -> None:
    prompts = [prompt for prompt in request.prompts for _ in range(num_answers)]
    most = [tokens for tokens in request.max_tokens for _ in range(num_answers)]
    several = replace(request, prompts=prompts, max_tokens=most, num_answers=num_answers)
    crossed_request, binary = whole(several)
    assert crossed_request == several
    assert len(binary) == 4 * sum(map(len, request.prompts))


@given(requests())
def test_stop_strings_stay_with_the_worker(request: EngineRequest) -> None:
    sampling = replace(request.sampling, stop=("a", "\ud800"))
    assert whole(replace(request, sampling=sampling))[0] == request


async def test_a_long_prompt_leaves_others_their_turns() -> None:
    """The numbers of 131,072 tokens in one turn held the loop for tens of milliseconds."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    prompts = [list(range(131_072)), list(range(7))]
    read: list[list[int]] = [[], []]
    packed = await pack(prompts)
    packing, turns = turns, 0
    await unpack(packed, read, [*map(len, prompts)])
    task.cancel()
    assert read == prompts
    assert min(turns, packing) >= 131_072 // TOKENS_PER_TURN


def test_every_parameter_crosses_but_stop_strings() -> None:
    """A parameter that is new is not forgotten here: its default would be used."""
    unusual = SamplingParams(
        max_tokens=50,
        min_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        seed=11,
        stop=(),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logit_bias=((3, -100.0), (7, 2.5)),
        allowed_token_ids=(3, 7, 9),
        bad_words=((7,), (3, 9)),
        logprobs=0,
        prompt_logprobs=2,
        grammar=Grammar(GrammarKind.REGEX, "[a-z]+"),
    )
    usual = SamplingParams()
    same = [one.name for one in fields(SamplingParams) if getattr(unusual, one.name) == getattr(usual, one.name)]
    assert same == ["stop"]
    deadlines = ClientDeadlines()
    asked = EngineRequest("r", "t", "k", [[1]], [50], unusual, None, "c", 0, None, None, None, None, deadlines, 1)
    assert whole(asked)[0].sampling == unusual


# errors


def kinds(kind: type[ApiError] = ApiError) -> Iterator[type[ApiError]]:
    for below in kind.__subclasses__():
        yield below
        yield from kinds(below)


def make(kind: type[ApiError]) -> ApiError:
    if kind is MethodNotAllowed:
        return MethodNotAllowed("no", "GET, HEAD")
    if kind is DeadlineUnmeetable:
        return DeadlineUnmeetable("late", 17.0, 2.5, deadline_is_relative=False, own_backlog=True)
    try:
        return kind("It is wrong.")
    except TypeError:
        return kind()  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [*kinds()], ids=lambda kind: kind.__name__)
def test_an_error_crosses_with_all_that_its_client_is_told(kind: type[ApiError]) -> None:
    error = make(kind)
    error.rate_headers = {"x-ratelimit-remaining-tokens": "3"}
    copy = error_of(crossed(error_message(error)))
    assert type(copy) is kind
    assert (copy.status, copy.outcome, copy.code, copy.dropped_reason, str(copy)) == (
        error.status,
        error.outcome,
        error.code,
        error.dropped_reason,
        str(error),
    )
    assert copy.headers() == error.headers()
    assert (copy.to_body(), copy.to_sse()) == (error.to_body(), error.to_sse())
    assert (copy.discreet_message, copy.discreet_param) == (error.discreet_message, error.discreet_param)


@given(st.text(), st.none() | st.text(), st.none() | st.floats(0, 1e6), st.dictionaries(names, st.integers(0, 2**63)))
def test_an_error_crosses_with_any_quote_of_the_request(
    message: str, param: str | None, wait: float | None, details: dict[str, int | float | str]
) -> None:
    """Lone surrogates become question marks, as they would in the answer."""
    for kind in (BadRequest, RateLimited):
        error = kind(message, param, retry_after=wait, details=details)
        copy = error_of(crossed(error_message(error)))
        assert (copy.to_body(), copy.headers()) == (error.to_body(), error.headers())


# records

traces = st.builds(
    TraceContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.none() | st.integers(1, 2**64 - 1),
    st.booleans(),
    names,
)
texts = st.none() | names
records = st.builds(
    RequestRecord,
    request_id=names,
    method=names,
    path=names,
    trace=traces,
    began=moments,
    began_ns=st.integers(0, 2**63),
    num_retries=st.integers(0, 999),
    tenant=texts,
    key=texts,
    model=texts,
    operation=texts,
    streams=st.booleans(),
    service_class=texts,
    policy_version=texts,
    response_id=texts,
    body_bytes=st.integers(0, 2**40),
    authenticated=st.none() | moments,
    body_read=st.none() | moments,
)
KNOWN = [one.name for one in fields(RequestRecord) if one.name != "engine"]  # which is filled in where it arrives


@given(records)
def test_a_record_crosses_unchanged(record: RequestRecord) -> None:
    copy = record_of(crossed(record_message(record)))
    assert [getattr(copy, name) for name in KNOWN] == [getattr(record, name) for name in KNOWN]


@given(
    records,
    st.sampled_from(Outcome),
    st.sampled_from([0, 200, 429, 499, 500]),
    st.none() | moments,
    moments,
    st.none() | moments,
    st.booleans(),
)
def test_the_end_of_a_record_crosses_unchanged(
    record: RequestRecord,
    outcome: Outcome,
    status: int,
    first_byte: float | None,
    ended: float,
    ended_early: float | None,
    has_failed: bool,
) -> None:
    copy = record_of(crossed(record_message(record)))
    for one in (record, copy):
        one.scope = RemoteRequest(0, _asked(), None)  # type: ignore[arg-type]  # nothing is sent
    assert record.scope is not None and copy.scope is not None
    record.outcome, record.status, record.first_byte, record.ended = outcome, status, first_byte, ended
    record.scope.ended_early = ended_early
    record.error = RateLimited("Slow down.", retry_after=1.5) if has_failed else None
    assert end(copy, crossed(end_message(record))) == (outcome, ended)
    assert (copy.status, copy.first_byte, copy.body_bytes) == (status, first_byte, record.body_bytes)
    assert copy.scope.ended_early == ended_early
    assert (copy.error and copy.error.to_body()) == (record.error and record.error.to_body())


def _asked() -> EngineRequest:
    none = (None, "c", 0, None, None, None, None)
    return EngineRequest("r", "t", "k", [[1]], [1], SamplingParams(), *none, ClientDeadlines(), 1)

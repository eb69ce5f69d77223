import orjson
import pytest

from gateway.replica.state import Changes, KVTokens, ReplicaState, StateError, StepCost, WaitingWork, parse_state

STATE = ReplicaState(
    instance="a1",
    model="embedded",
    draining=False,
    running=3,
    seats=8,
    seat_seconds=0.0,
    step_seconds=0.01,
    prefill_seconds=0.2,
    token_seconds=0.0001,
    bytes_per_token=4.5,
    work_seconds=12.0,
    replicas_wanted=1.2,
    step=StepCost((0.001,) * 7, 512, 0.05),
    kv=KVTokens(1000, 200, 300),
    beginnings=Changes(3, ["0a"], [], is_all=True),
    waiting={"acme": WaitingWork(2, 0.1, 1.5)},
)


def test_a_document_tells_the_state() -> None:
    assert parse_state(orjson.dumps(STATE)) == STATE


@pytest.mark.parametrize(
    ("document", "place"),
    [(b"", "the document"), (b"[]", "the document"), (b"{}", "instance"), (orjson.dumps(STATE)[:-1], "the document")],
)
def test_anything_else_is_refused_and_its_place_told(document: bytes, place: str) -> None:
    with pytest.raises(StateError, match=place):
        parse_state(document)

import json

import pytest

from labs.benchmarks.gpu_check.first_tokens import first_tokens


def line(*entry: object) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def arrival(seconds: float, name: str, refusal: str | None = None) -> str:
    rest: tuple[object, ...] = (100, 10, 10, 0, None, 0, 9.0, None, None, 0.5, 1.0, refusal, [], None, None, None)
    return line("arrive", seconds, name, "light", *rest)


def test_a_first_token_waits_for_its_plan_then_for_the_step_in_flight_then_for_its_own() -> None:
    lines = [
        line("plan", 1.0, 7, 3, 0, [], [], None, None, []),
        arrival(1.25, "one"),
        arrival(1.25, "refused", "deadline"),
        line("plan", 1.5, 8, 3, 0, [["one", 60]], [], None, None, []),
        line("done", 2.0, 7, 1.0, [], [], []),
        line("plan", 2.0, 9, 3, 0, [["other", 9], ["one", 40]], [], None, None, []),
        line("finish", 2.5, "other", "cancelled"),
        line("done", 3.0, 8, 1.0, [], [], []),
        line("done", 5.0, 9, 2.0, [], [], []),
    ]
    (one,), steps = first_tokens(lines)
    assert (one.tenant, one.by, one.steps, steps) == ("light", 9.0, 3, [1.0, 1.0, 2.0])
    assert one.parts == pytest.approx((0.25, 1.5, 2.0)) and one.waited == sum(one.parts)
    (unknown,), _ = first_tokens(lines[:4])
    assert unknown.came is None

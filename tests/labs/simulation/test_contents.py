"""What a trace says of contents becomes hits: as many as an exact count of what prompts have in common."""

from random import Random

import pytest

from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content
from labs.simulation.recording import AS_RECORDED
from labs.simulation.workload import Flood, Workload
from tests.labs.simulation.runs import simulated

BLOCK, UNIT = 16, 512
APART = 30.0  # seconds, in which any of these requests is over


def conversations(seed: int, count: int = 60, tenants: int = 2) -> list[Arrival]:
    """Makes requests like Mooncake's: turns that begin with all of the turn before, in units of 512 tokens."""
    random, arrivals, ids = Random(seed), list[Arrival](), iter(range(100, 10**9))
    turns: list[tuple[str, list[int]]] = []
    for number in range(count):
        if turns and random.random() < 0.6:
            tenant, before = random.choice(turns)
        else:
            tenant, before = f"tenant-{random.randrange(tenants)}", [0]
        told = [*before, *(next(ids) for _ in range(random.randint(1, 3)))]
        length = (len(told) - 1) * UNIT + random.randint(1, UNIT)
        content = Content(tuple(told), UNIT, length)
        arrivals.append(Arrival(number * APART, length, random.randint(1, 40), tenant=tenant, content=content))
        turns.append((tenant, told))
    return arrivals


def exact_hits(arrivals: list[Arrival]) -> dict[str, int]:
    """Counts by tenant the prompt tokens that a memory without bounds has, by comparing prompts token by token."""
    seen: dict[str, set[tuple[object, ...]]] = {}
    hits: dict[str, int] = {}
    for arrival in arrivals:
        assert arrival.content is not None
        tokens = [(id_, at) for at, id_ in enumerate(arrival.content.ids) for _ in range(UNIT)][: arrival.prompt_tokens]
        known = seen.setdefault(arrival.tenant, set())
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        found = 0
        for end in ends:
            if (end, *tokens[:end:UNIT], tokens[end - 1]) not in known or end > len(tokens) - 1:
                break
            found = end
        hits[arrival.tenant] = hits.get(arrival.tenant, 0) + found
        known.update((end, *tokens[:end:UNIT], tokens[end - 1]) for end in ends)
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_without_bounds_of_memory_hits_are_what_an_exact_count_says(seed: int) -> None:
    arrivals = conversations(seed)
    recorder, core, _ = simulated("fcfs,num_blocks=200000,max_model_len=32768", arrivals)
    exact = exact_hits(arrivals)
    assert {name: tenant.cached_tokens for name, tenant in recorder.tenants.items()} == exact
    assert sum(exact.values()) == core.scheduler.counters.cached_tokens > 10_000
    computed = sum(tenant.prompt_tokens + tenant.cached_tokens for tenant in recorder.tenants.values())
    assert computed == sum(arrival.prompt_tokens for arrival in arrivals)
    core.scheduler.check_integrity()


def test_a_turn_of_a_session_finds_the_prompt_and_the_answer_before_it() -> None:
    content = Content.of_session(7)
    turns = [Arrival(n * APART, 100 + 80 * n, 60, content=content, tenant="a") for n in range(4)]
    other = Arrival(5 * APART, 300, 60, content=content, tenant="b")
    recorder, _, _ = simulated("fair", [*turns, other])
    # of what was computed before: all full blocks of the prompt and the answer, whose last token never is
    before = [(100 + 80 * n + 59) // BLOCK * BLOCK for n in range(3)]
    assert recorder.tenants["a"].cached_tokens == sum(before)
    assert recorder.tenants["b"].cached_tokens == 0, "another tenant finds nothing"


def test_tenants_share_what_they_shared_when_it_was_recorded_unless_others_are_given() -> None:
    content = Content((1, 2), UNIT, scope=AS_RECORDED)
    trace = tuple(Arrival(n * APART, 2 * UNIT, 5, tenant=name, content=content) for n, name in enumerate("ab"))
    recorder, _, _ = simulated("fair", Workload(trace).arrivals(1))
    assert recorder.tenants["b"].cached_tokens == 2 * UNIT - BLOCK
    others = Workload(trace, tenants="100").arrivals(1)
    recorder, _, _ = simulated("fair", others)
    assert others[0].tenant != others[1].tenant and not recorder.tenants[others[1].tenant].cached_tokens


def test_a_trace_that_is_repeated_or_drawn_from_shares_nothing_with_itself() -> None:
    trace = (Arrival(0.0, 1000, 5, content=Content((1, 2), UNIT)), Arrival(9.0, 800, 5, content=Content((1, 3), UNIT)))
    repeated = Workload(trace, requests=4).arrivals(1)
    contents = [arrival.content for arrival in repeated]
    assert contents[:2] == [trace[0].content, trace[1].content] and not set(contents[:2]) & set(contents[2:])
    recorder, _, _ = simulated("fair", repeated)
    assert recorder.tenants["everyone"].cached_tokens == 2 * UNIT
    drawn = Workload(trace, requests=5, rate=1.0, floods=(Flood("noisy", 5.0, 0.0, 1.0),)).arrivals(1)
    assert all(arrival.content is None for arrival in drawn)


def test_several_answers_to_a_prompt_are_simulated_from_one_prefill() -> None:
    content = Content((1,), None)
    request = Arrival(
        0.0, 1003, 8, more_prompts=((1003, 9, 9),) * 3, content=content, more_contents=(content,) * 3, num_answers=4
    )
    again = request._replace(time=APART, content=Content((2,), None), more_contents=(Content((2,), None),) * 3)
    recorder, core, _ = simulated("fair", [request, again])
    tenant = recorder.tenants[""]
    assert (tenant.prompt_tokens, tenant.cached_tokens, tenant.output_tokens) == (2006, 0, 2 * (8 + 27))
    assert core.scheduler.counters.prompt_tokens == 2006


def test_an_answer_of_which_the_trace_says_nothing_is_not_found() -> None:
    prompt = Arrival(0.0, 160, 64, content=Content((1,), UNIT, 160))
    longer = prompt._replace(time=APART, prompt_tokens=400, content=Content((1,), UNIT, 400))
    recorder, _, _ = simulated("fair", [prompt, longer])
    assert recorder.tenants[""].cached_tokens == 160


def test_copies_to_the_host_take_their_time_and_what_was_swapped_is_found() -> None:
    first = Arrival(0.0, 1600, 8, content=Content((1, 2, 3, 4), UNIT))
    other = Arrival(APART, 1600, 8, content=Content((5, 6, 7, 8), UNIT))
    arrivals = [first, other, first._replace(time=2 * APART)]
    small = "fair,num_blocks=110,max_model_len=1700,num_host_blocks=400"
    recorder, core, _ = simulated(f"{small},block_copy_seconds=1e-6", arrivals)
    slower, _, _ = simulated(f"{small},block_copy_seconds=2e-5", arrivals)
    assert recorder.tenants[""].cached_tokens > 1000 and slower.tenants[""].cached_tokens > 1000
    assert slower.first_token_times[2] > recorder.first_token_times[2] + 50 * 1.5e-5
    core.scheduler.check_integrity()

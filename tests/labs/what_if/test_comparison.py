import pickle
from itertools import count

import pytest

from admission.core import CoreConfig
from admission.step_times.step_time import StepTime
from backend.config import EngineConfig
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content
from labs.simulation.device import DEVICES, Device, Served
from labs.simulation.errors import OptionError
from labs.simulation.recording import AS_RECORDED, NO_FACTS, TraceFacts
from labs.simulation.traces import Traffic
from labs.what_if.comparison import WhatIf, what_if
from quotas.policy.policy_file import field_places, parse_policy
from tests.quotas.policies import parsed

STEPS = StepTime((5e-3, 1e-4, 1e-4, 0.0, 0.0, 0.0, 0.0))
SERVED = Served(CoreConfig(), EngineConfig(num_blocks=2000, max_model_len=4096), (STEPS, 50.0))
RATES = DEVICES["llama3-8b-a100"].rates
DEVICE = Device("as recorded", STEPS.seconds, RATES, 32_000, 1024.0, SERVED)
FACTS = TraceFacts(has_tiers=True, has_keys=True, has_body_bytes=True, model="m", began=1.7e9)
LIFTED = "{limits: {requests: unlimited}}"
BEFORE = "tenants: {acme: {}, globex: {}}"


def traffic(requests: int = 60, facts: TraceFacts = FACTS, device: Device | None = DEVICE) -> Traffic:
    arrivals = [
        Arrival(100 + 0.2 * n, 50 + n % 90, 5 + n % 40, tenant=("acme", "globex")[n % 2], key=f"k{n % 4}")
        for n in range(requests)
    ]
    return Traffic(arrivals, device, facts)


def edited(after: str, facts: TraceFacts = FACTS, requests: int = 60) -> WhatIf:
    places = field_places({"edited.yaml": after.encode()})
    policy = parse_policy({"edited.yaml": after.encode()})
    return what_if(traffic(requests, facts), parsed(BEFORE), policy, places)


@pytest.mark.parametrize(
    "edit",
    [
        "tenants: {acme: {default_class: batch}, globex: {}}",
        "tenants: {acme: {highest_class: batch}, globex: {}}",
        "tenants: {acme: {limits: {requests: 1/s}}, globex: {}}",
        "tenants: {acme: {limits: {output_tokens: 100/min}}, globex: {}}",
        "tenants: {acme: {limits: {concurrent_requests: 0}}, globex: {}}",
        "tenants: {acme: {limits: {kv_bytes: 100KiB}}, globex: {}}",
        "tenants: {acme: {price: {input: 1/1M, output: 1/1M, currency: EUR}}, globex: {}}",
        "tenants: {acme: {keys: {k0: {limits: {requests: 5/day}}}}, globex: {}}",
        "tenants: {acme: {models: [other]}, globex: {}}",
        "unnamed_tenants: refuse\ntenants: {acme: {}}",
        "defaults: {default_class: interactive}\ntenants: {acme: {}, globex: {}}",
    ],
)
def test_an_edit_shows(edit: str) -> None:
    result = edited(edit)
    assert result.before != result.after and result.changes and not result.not_simulated


def test_no_edit_is_no_difference() -> None:
    result = edited(BEFORE)
    assert result.before == result.after and not result.changes and not result.not_simulated
    assert (result.num_requests, result.num_left_out) == (60, 0) and result.before.completed == 60


@pytest.mark.parametrize(
    ("after", "facts", "told"),
    [
        ("tenants: {acme: {on_store_outage: open}, globex: {}}", FACTS, "on_store_outage at edited.yaml:1: the quota"),
        (
            f"defaults:\n  limits:\n    requests: 5/s\ntenants: {{acme: {LIFTED}, globex: {LIFTED}}}",
            FACTS,
            "not simulated: defaults.limits.requests at edited.yaml:3: every tenant of the trace is named in a policy",
        ),
        ("tenants: {acme: {}, globex: {}, umbra:\n {weight: 3}}", FACTS, "tenants.umbra.weight at edited.yaml:2: the"),
        ("tenants: {acme: {models: [m]}, globex: {}}", NO_FACTS, "the trace does not say which models were asked for"),
        ("tenants: {acme: {keys: {k9: {scopes: [limits]}}}, globex: {}}", FACTS, "has no requests with this key"),
        ("tenants: {acme: {keys: {k0: {scopes: [limits]}}}, globex: {}}", NO_FACTS, "the trace has no API keys"),
        (
            "classes: {interactive: {}, standard: {}, batch: {service_tiers: [flex]}}\n" + BEFORE,
            NO_FACTS,
            "classes.interactive.service_tiers at edited.yaml:1: the trace has no service tiers",
        ),
        ("classes: {interactive: {}, standard: {queue: {bytes: 1MiB}}}\n" + BEFORE, NO_FACTS, "how long bodies are"),
        ("tenants: {acme: {prefix_cache: {floor: 1MiB}}, globex: {}}", FACTS, "does not say what prompts share"),
        (
            "tenants: {acme: {prefix_cache: {pinned: [Be brief.]}}, globex: {}}",
            FACTS._replace(has_contents=True),
            "tenants.acme.prefix_cache.pinned at edited.yaml:1: a trace says how long",
        ),
        (
            "tenants: {acme: {price: {input: 1/1M, cached_input: 0.5/1M, output: 1/1M, currency: EUR}}, globex: {}}",
            FACTS,
            "tenants.acme.price.cached_input at edited.yaml:1: the trace does not say what prompts share",
        ),
        (BEFORE + "\nprefix_sharing: {all: [acme, globex]}", FACTS, "does not say what prompts share"),
        (
            BEFORE + "\nprefix_sharing: {all: [acme, globex]}",
            FACTS._replace(has_contents=True, is_recorded=True),
            "prefix_sharing.all at edited.yaml:2: blocks in an event log are told apart by the tenants that shared",
        ),
    ],
)
def test_a_change_without_effect_in_simulation_is_told_by_its_line(after: str, facts: TraceFacts, told: str) -> None:
    assert any(told in line for line in edited(after, facts, requests=8).not_simulated)


GROUP = "\nprefix_sharing: {family: [%s]}"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("acme, globex", "", None),
        ("", "acme, globex", None),
        ("acme, globex, umbra", "acme, globex", "umbra"),
        ("acme, umbra", "", "acme, umbra"),
    ],
)
def test_a_group_is_simulated_as_far_as_its_tenants_are_seen_to_share(
    before: str, after: str, told: str | None
) -> None:
    """`acme` and `globex` shared the log's contents; no other tenants have anything in common."""
    facts = FACTS._replace(has_contents=True, is_recorded=True)
    told_apart = [Content((1, 2), 16, scope=AS_RECORDED), Content((3,), 16, scope=AS_RECORDED)]
    arrivals = [
        Arrival(n * 1.0, 40, 5, tenant=tenant, key="k0", content=told_apart[tenant == "umbra"])
        for n, tenant in enumerate(("acme", "globex", "umbra") * 3)
    ]
    tenants = "tenants: {acme: {}, globex: {}, umbra: {}}"
    old, new = (parsed(tenants + (GROUP % names if names else "")) for names in (before, after))
    result = what_if(Traffic(arrivals, DEVICE, facts), old, new)
    if told is None:
        assert result.not_simulated == ()
        assert (result.before.hit_rate > result.after.hit_rate) == (not after)
    else:
        (line,) = result.not_simulated
        assert f"it has none that {told} shared with another of these" in line


def test_a_class_without_requests_is_named() -> None:
    after = "classes: {interactive: {}, standard: {}, batch: {aging: 1h}}\n" + BEFORE
    assert any(
        "classes.batch.aging at edited.yaml:1: no request was" in line
        for line in edited(after, requests=8).not_simulated
    )


def test_limits_begin_unused_and_that_is_said() -> None:
    after = "tenants: {acme: {limits: {tokens: 1M/month}}, globex: {}}"
    assert edited(after, requests=8).assumed == ("assumed: limits begin unused",)
    assert "the trace has no calendar" in edited(after, NO_FACTS, requests=8).assumed[0]


def test_when_its_time_is_over_both_have_come_as_far() -> None:
    ticks = count()
    after = parsed("tenants: {acme: {limits: {requests: 1/s}}, globex: {}}")
    result = what_if(traffic(120), parsed(BEFORE), after, most_seconds=30, clock=lambda: float(next(ticks)))
    assert 0 < result.num_requests < 120 and result.num_left_out == 120 - result.num_requests
    assert result.before.offered == result.after.offered == result.num_requests


def test_the_newest_requests_are_taken_where_there_are_too_many() -> None:
    result = what_if(traffic(120), parsed(BEFORE), parsed(BEFORE), most_requests=50)
    assert (result.num_requests, result.num_left_out, result.before.offered) == (50, 70, 50)


def test_it_may_be_computed_in_another_process() -> None:
    arguments = traffic(20), parsed(BEFORE), parsed("tenants: {acme: {limits: {requests: 1/day}}}")
    there = pickle.loads(pickle.dumps(what_if(*pickle.loads(pickle.dumps(arguments)))))
    assert there == what_if(*arguments)


def test_it_needs_a_device_and_requests() -> None:
    for wrong in (traffic(device=None), traffic(0)):
        with pytest.raises(OptionError, match="needs requests, and the device"):
            what_if(wrong, parsed(BEFORE), parsed(BEFORE))

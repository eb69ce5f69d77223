"""Everything that an event log may have to say has a name in it, which no renaming in the code changes."""

import json
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from itertools import chain

import pytest

from admission.core import CoreConfig
from admission.event_logs.names import (
    ADAPTER_FIELDS,
    BOUNDS,
    CHOICES,
    CORE_FIELDS,
    ENGINE_FIELDS,
    EXPERT_FIELDS,
    POLICY_FIELDS,
    REFUSALS,
    SLEEP_FIELDS,
    SPECULATION_FIELDS,
    WINDOW_FIELDS,
    core_entry,
    engine_entry,
    policy_entry,
    read_core_config,
    read_engine_config,
    read_scheduling_policy,
)
from admission.explain import REASONS
from admission.outcome import AdmissionRefused
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from backend.config import EngineConfig
from backend.scheduler.scheduled_step import WaitReason

REMEDY = (
    "{} is not in admission/event_logs/names.py: give it a name there; logs of before do not say it, so delete "
    "those of tests/labs/core/recorded and record them anew with `python -m scripts.record_logs`"
)
OF_ENGINE = (ENGINE_FIELDS, ADAPTER_FIELDS, SLEEP_FIELDS, EXPERT_FIELDS, WINDOW_FIELDS, SPECULATION_FIELDS)
ENGINE = EngineConfig(num_blocks=40, max_model_len=120)


def check_all(wanted: Iterable[object], found: Iterable[object]) -> None:
    """Fails with the remedy for what has no name, and for a name behind which there is nothing any more."""
    wanted, found = set(wanted), set(found)
    for missing in wanted - found:
        pytest.fail(REMEDY.format(missing))
    assert not found - wanted, "a name stands for nothing in the code: rename it, with its name in the log in LOGGED_AS"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (EngineConfig, tuple(chain.from_iterable(OF_ENGINE))),
        (CoreConfig, CORE_FIELDS),
        (SchedulingPolicy, POLICY_FIELDS),
        (QueueBounds, BOUNDS),
    ],
)
def test_every_field_has_a_name(kind: type, names: tuple[str, ...]) -> None:
    check_all((field.name for field in fields(kind)), names)


def test_every_choice_and_refusal_has_a_name() -> None:
    chosen = {one.name: getattr(config, one.name) for config in (ENGINE, CoreConfig()) for one in fields(config)}
    assert {field: type(one) for field, one in chosen.items() if isinstance(one, Enum)} == CHOICES
    raised = [kind for kind in AdmissionRefused.__subclasses__() if kind.__module__ == AdmissionRefused.__module__]
    check_all(raised, REFUSALS)


def test_every_obstacle_can_be_explained() -> None:
    assert REASONS.keys() == set(WaitReason)


def test_an_object_without_a_name_in_the_log_is_told_with_a_remedy() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"page_size is not in .* give it a name there"):
        check_all({"block_size", "page_size"}, {"block_size"})
    with pytest.raises(AssertionError, match="stands for nothing in the code"):
        check_all({"block_size"}, {"block_size", "page_size"})


def test_a_configuration_written_by_names_is_read_again() -> None:
    for choice, values in CHOICES.items():
        for value in values:
            if choice in ENGINE_FIELDS:
                config = EngineConfig(num_blocks=40, max_model_len=120, **{choice: value})
                assert read_engine_config(json.loads(json.dumps(engine_entry(config)))) == config
            else:
                core = CoreConfig(weights={"a": 2.0}, max_waiting=None, **{choice: value})
                assert read_core_config(json.loads(json.dumps(core_entry(core)))) == core
    of_adapters = EngineConfig(40, 120, max_adapter_rank=8, adapter_block_seconds=(1e-6, 2e-7, 3e-5))
    of_two = EngineConfig(40, 120, max_adapter_rank=8, adapter_block_seconds=(1e-6, 2e-7, 3e-5, 0.0, 0.0, 0.0))
    windows = EngineConfig(400, 120, further_windows=((0, 0), (5, 16)))
    for config in (of_adapters, EngineConfig(40, 120, expert_reads=((0.9, 0.5), (0.0, 0.0))), of_two, windows):
        assert read_engine_config(json.loads(json.dumps(engine_entry(config)))) == config
    policy = SchedulingPolicy({"a": 2.0}, (0.0, 1.0), (QueueBounds(1, 2, 3, 4.0), QueueBounds()), {"": 3})
    assert read_scheduling_policy(policy_entry(policy)) == policy

"""Everything that an event log may have to say has a name in it, which no renaming in the code changes."""

import json
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum

import pytest

from admission.core import CoreConfig
from admission.event_logs.names import (
    ADAPTER_FIELDS,
    BOUNDS,
    CHOICES,
    CORE_FIELDS,
    ENGINE_FIELDS,
    EXPERT_FIELDS,
    FINISH_REASONS,
    OBSTACLES,
    POLICY_FIELDS,
    REFUSALS,
    SLEEP_FIELDS,
    WINDOW_FIELDS,
    Names,
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
from backend.scheduler.sequence import FinishReason

REMEDY = (
    "{} is not in admission/event_logs/names.py: give it a name there; logs of before do not say it, so delete "
    "those of tests/labs/core/recorded and record them anew with `python -m scripts.record_logs`"
)
OF_ENGINE = (ENGINE_FIELDS, ADAPTER_FIELDS, SLEEP_FIELDS, EXPERT_FIELDS, WINDOW_FIELDS)
ENGINE = EngineConfig(num_blocks=40, max_model_len=120)


def named(names: Names[str] | tuple[str, ...]) -> set[str]:
    return {field for _, field in names.items()} if isinstance(names, Names) else set(names)


def check_all(wanted: Iterable[object], found: Iterable[object]) -> None:
    """Fails with the remedy for what has no name, and for a name behind which there is nothing any more."""
    wanted, found = set(wanted), set(found)
    for missing in wanted - found:
        pytest.fail(REMEDY.format(missing))
    assert not found - wanted, "a name stands for nothing in the code: its right side has to follow what was renamed"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (EngineConfig, tuple(field for fields in OF_ENGINE for field in named(fields))),
        (CoreConfig, CORE_FIELDS),
        (SchedulingPolicy, POLICY_FIELDS),
        (QueueBounds, BOUNDS),
    ],
)
def test_every_field_has_a_name(kind: type, names: Names[str] | tuple[str, ...]) -> None:
    check_all((field.name for field in fields(kind)), named(names))


@pytest.mark.parametrize(("config", "names"), [(ENGINE, ENGINE_FIELDS), (CoreConfig(), CORE_FIELDS)])
def test_every_value_of_a_choice_has_a_name(config: object, names: Names[str]) -> None:
    choices = {name: getattr(config, field) for name, field in names.items()}
    choices = {name: type(value) for name, value in choices.items() if isinstance(value, Enum)}
    assert choices.keys() == CHOICES.keys() & set(names)
    for name, kind in choices.items():
        check_all(kind, (value for _, value in CHOICES[name].items()))


def test_every_refusal_end_and_obstacle_has_a_name() -> None:
    raised = [kind for kind in AdmissionRefused.__subclasses__() if kind.__module__ == AdmissionRefused.__module__]
    check_all(raised, (kind for _, kind in REFUSALS.items()))
    check_all(FinishReason, (reason for _, reason in FINISH_REASONS.items()))
    check_all(WaitReason, (reason for _, reason in OBSTACLES.items()))


def test_every_obstacle_can_be_explained() -> None:
    assert REASONS.keys() == set(OBSTACLES)


def test_an_object_without_a_name_in_the_log_is_told_with_a_remedy() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"page_size is not in .* give it a name there"):
        check_all({"block_size", "page_size"}, {"block_size"})
    with pytest.raises(AssertionError, match="has to follow what was renamed"):
        check_all({"block_size"}, {"block_size", "page_size"})


def test_a_configuration_written_by_names_is_read_again() -> None:
    values = {name: [value for _, value in names.items()] for name, names in CHOICES.items()}
    for choice, kinds in values.items():
        for value in kinds:
            if choice in set(ENGINE_FIELDS):
                config = EngineConfig(num_blocks=40, max_model_len=120, **{ENGINE_FIELDS[choice]: value})
                assert read_engine_config(engine_entry(config)) == config
            else:
                core = CoreConfig(weights={"a": 2.0}, max_waiting=None, **{CORE_FIELDS[choice]: value})
                assert read_core_config(core_entry(core)) == core
    of_adapters = EngineConfig(40, 120, max_adapter_rank=8, adapter_block_seconds=(1e-6, 2e-7, 3e-5))
    for config in (of_adapters, EngineConfig(40, 120, expert_reads=((0.9, 0.5), (0.0, 0.0)))):
        assert read_engine_config(json.loads(json.dumps(engine_entry(config)))) == config
    policy = SchedulingPolicy({"a": 2.0}, (0.0, 1.0), (QueueBounds(1, 2, 3, 4.0), QueueBounds()), {"": 3})
    assert read_scheduling_policy(policy_entry(policy)) == policy

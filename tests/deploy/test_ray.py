"""The configuration of Ray Serve, and what of `sluice.ray` needs Ray, where that is installed."""

import importlib
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fleet.child import settings_of

(APPLICATION,) = yaml.safe_load(Path("deploy/ray/serve.yaml").read_text())["applications"]


def test_a_replica_could_start_with_the_flags_of_the_file() -> None:
    settings_of(shlex.split(APPLICATION["args"]["flags"]))


@pytest.fixture
def ray() -> Any:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    return importlib.import_module("sluice.ray")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_the_file_names_the_application_and_what_it_takes(ray: Any) -> None:
    assert APPLICATION["import_path"] == f"sluice.ray:{ray.application.__name__}"
    options = ray.Options.model_validate(APPLICATION["args"])
    assert (options.min_replicas, options.max_replicas) == (2, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("told", "running", "wanted"),
    [({}, 2, 2), ({"a": 0.2, "b": 0.3}, 2, 1), ({"a": 2.5}, 2, 4), ({"a": 1.0, "b": 1.0}, 2, 2)],
)
def test_as_many_replicas_are_wanted_as_they_tell_and_one_for_each_that_starts(
    ray: Any, told: dict[str, float], running: int, wanted: int
) -> None:
    context = SimpleNamespace(aggregated_metrics={ray.WANTED: told}, current_num_replicas=running)
    assert ray.replicas_wanted(context) == (wanted, {})

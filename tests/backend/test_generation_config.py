import json
from pathlib import Path
from typing import Any

import pytest

from backend.errors import ModelLoadError
from backend.generation_config import read_sampling_defaults


def write(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_a_checkpoint_without_the_file_sets_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}


def test_sampling_values_become_defaults_and_the_rest_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, do_sample=True, temperature=0.6, top_p=0.9, top_k=20, eos_token_id=[1, 2], max_length=77)
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_do_sample_false_makes_greedy_the_default(tmp_path: Path) -> None:
    assert read_sampling_defaults(write(tmp_path, do_sample=False)) == {"temperature": 0.0}


def test_greedy_by_default_keeps_the_repetition_penalty_and_no_more(tmp_path: Path) -> None:
    write(tmp_path, do_sample=False, temperature=0.6, top_p=0.9, repetition_penalty=1.3)
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.0, "repetition_penalty": 1.3}


@pytest.mark.parametrize("value", [-1, "warm", float("nan")])
def test_a_value_that_nobody_may_ask_for_is_refused_by_file_and_key(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config.json: temperature is"):
        read_sampling_defaults(write(tmp_path, temperature=value))

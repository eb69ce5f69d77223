import json

import pytest
import torch

from labs.benchmarks.gpu_check import masks

CPU = torch.device("cpu")
TEXTS = (
    ("abcde-12", "abcde-12, either this or that", "a-12", "abcde-12 "),
    (
        json.dumps(dict(identification_number=7, department_of_origin="returns", is_complete=True, remarks="ab")),
        json.dumps(dict(identification_number=0, department_of_origin="returns", is_complete=False, remarks="")),
        json.dumps(dict(identification_number=101, department_of_origin="returns", is_complete=True, remarks="")),
        '{"identification_number": 7',
    ),
    (
        "the first of 2 places, counted from the left",
        "the last of 2 places, counted from the left",
        "the third of 2 places, counted from the left",
        "the first",
    ),
    ("row 2: 1 and 22 and 333", "row 2: 1 and 2 and 9999", "row 2: 1 and 2", "row 2: 01 and 2 and 3"),
)


@pytest.mark.parametrize(("number", "texts"), [*enumerate(TEXTS)])
def test_each_kind_of_grammar_is_judged_by_its_own_words(number: int, texts: tuple[str, str, str, str]) -> None:
    asked = masks._asked(number)
    assert [asked.matches(text) for text in texts] == [True, True, False, False]


@pytest.mark.nightly
def test_all_answers_match_and_some_of_their_tokens_are_forced() -> None:
    pytest.importorskip("llguidance")
    assert all(finding.met for finding in masks.check(CPU))

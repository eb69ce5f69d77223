"""scripts/structure.py: its figures of a tree of a few files, and of a request that is served."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from scripts.request_path import Trips
from scripts.structure import PACKAGES, Figure, layout

ROOT = Path(__file__).parent.parent
TREE = {
    "gateway/__init__.py": "",
    "gateway/app.py": """\
        '''Serves requests over HTTP.'''

        from collections.abc import Sequence as Many
        from starlette.requests import Request

        from backend import core as engine
        from backend.request import Request as EngineRequest

        def run():
            '''What is run.'''
            def inner():
                pass
        """,
    "gateway/big.py": "import gateway.app\n" * 601,
    "backend/core.py": "class Policy: ...\nclass Request: ...\nclass Sequence: ...\ndef run(): ...\ndef _run(): ...\n",
    "backend/request.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from backend.core import Policy\n"
    "class Request:\n    '''Once.'''\n",
    "quotas/policy.py": "class Policy: ...\ndef _run(): ...\n",
    "tests/gateway/test_app.py": "import gateway\n",
    "tests/gateway/test_other.py": "import gateway\n",
    "tests/conftest.py": "import pytest\n",
}
SERVED = """
import asyncio

async def app(scope, receive, send):
    await step()
    await step()
    return [helper(n) for n in range(3)]

async def step():
    await asyncio.sleep(0)

def helper(n):
    return n
"""
HANDED_OVER = """
def submit(queue):
    queue.put(prepare())

def prepare():
    return sum(n for n in range(3))
"""


def written(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.replace("\n        ", "\n").strip() + "\n" if source else "")
    return root


@pytest.fixture
def figures(tmp_path: Path) -> dict[str, Figure]:
    return {figure.name: figure for figure in layout(written(tmp_path, TREE))}


def test_sizes_and_importers(figures: dict[str, Figure]) -> None:
    assert figures["modules"].value == 5, "one that is empty is none"
    assert figures["lines"].value == 625
    assert figures["lines of a module, median"].value == 5
    assert figures["modules of less than 50 lines"].value == 4
    assert figures["modules of more than 600 lines"].places == ["gateway/big.py: 601"]
    assert figures["modules that one other imports"].places == [
        "gateway.app: gateway.big",
        "backend.request: gateway.app",
    ]
    assert figures["folders"].places == ["gateway: 2", "backend: 2", "quotas: 1"]


def test_functions_are_measured_from_def_to_their_last_line(figures: dict[str, Figure]) -> None:
    assert figures["functions"].value == 5
    assert figures["lines of a function, median"].value == 1
    assert figures["lines of a function, most"].places == [
        "gateway/app.py:9 run: 4",
        "gateway/app.py:11 inner: 2",
        "quotas/policy.py:2 _run: 1",
        "backend/core.py:5 _run: 1",
        "backend/core.py:4 run: 1",
    ]


def test_classes(tmp_path: Path) -> None:
    fields = "".join(f"    field_{number}: int\n" for number in range(31))
    own = "".join(f"  self.own_{number} = 0\n" for number in range(13))
    methods = "".join(f"class Small{n}:\n    def settle(self): ...\n    def _hide(self): ...\n" for n in range(9))
    records = f"class Record:\n{fields}    def __post_init__(self): ...\n"
    files = {"backend/records.py": records, "backend/own.py": f"class Own:\n def __init__(self):\n{own}"}
    files["backend/small.py"] = methods
    found = {figure.name: figure for figure in layout(written(tmp_path, files))}
    assert found["fields of a class, most"].value == 31
    assert found["records of more than 30 fields"].places == ["backend/records.py:1 Record: 31"]
    assert found["other classes of more than 12 fields"].places == ["backend/own.py:1 Own: 13"]
    (method,) = found["public methods of one name on more than 8 classes"].places
    assert method.startswith("settle: 9: Small0 (backend/small.py), ")


def test_structure_counts_names_that_a_reader_cannot_see_at_their_use(tmp_path: Path) -> None:
    core = """\
        LIMIT_S, SIZE = -2.0 * 60, 3
        NAMES = ("a", "b")
        IS_ON = True
        Hook = Callable[[int], int]

        class Part:
            hook: Hook
            count: int

        class Owner:
            def __init__(self, part):
                self.part, self.hook = part, abs
                self.part.hook = self.run
                part.count = 3
                part.other = lambda: 3
        """
    packed = """\
        def make(a, b):
            print(*(a, b))
            print(*a)
        """
    files = {"admission/core.py": core, "quotas/core.py": "LIMIT = 3\n", "labs/packed.py": packed}
    files["docs/page.md"] = "So many words,\nwhoever reads them.\nWords.\n"
    found = {figure.name: figure for figure in layout(written(tmp_path, files))}
    assert found["module constants of the core"].places == ["admission/core.py:1: LIMIT_S", "admission/core.py:1: SIZE"]
    assert found["callables set from outside"].places == [
        "admission/core.py:13: self.part.hook",
        "admission/core.py:15: part.other",
    ]
    assert found["star-packed argument lists"].places == ["labs/packed.py:2: *(a, b)"]
    assert found["riddles: lines with so many, whoever or whatever"].value == 2
    assert found["lines of labs"].value == 3


def test_tests_mirror_modules(figures: dict[str, Figure]) -> None:
    assert figures["test modules that mirror no module"].places == ["gateway/other"]
    assert figures["modules without a test module of their name"].places == [
        "backend/core",
        "backend/request",
        "gateway/big",
        "quotas/policy",
    ]
    assert figures["lines of tests"].value == 3


def test_a_call_is_a_function_that_begins_and_not_one_that_goes_on(tmp_path: Path) -> None:
    files = {"gateway/served.py": SERVED, "backend/device.py": HANDED_OVER}
    written(tmp_path, files)
    names: dict[str, Any] = {}
    for name, source in files.items():
        exec(compile(source, tmp_path / name, "exec"), names)
    trips = Trips(tmp_path, PACKAGES)
    before = sys.getprofile()
    sys.setprofile(trips)
    try:
        asyncio.run(names["app"]({}, None, None))
        names["submit"](SimpleQueue())
        names["submit"](SimpleQueue())
    finally:
        sys.setprofile(before)
    (request,), ((step,),) = trips.requests, trips.steps
    assert request == {"gateway/served.py": 1 + 2 + 3, "backend/device.py": 2}
    assert step == {"backend/device.py": 2}


@pytest.mark.nightly
def test_the_command_counts_what_a_request_crosses_and_compares(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"figures": {"modules": 12345}}))
    command = [sys.executable, "-m", "scripts.structure", "--requests", "3", "--list"]
    files = [f"--json={tmp_path / 'now.json'}", f"--compare={before}"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    now = json.loads((tmp_path / "now.json").read_text())["figures"]
    for trip in ("endpoint to device", "decode step", "streamed decode step"):
        for settings in ("", ", limits and event log"):
            assert 0 < now[f"{trip}{settings}: files of its calls"] < now[f"{trip}{settings}: calls"]
        assert now[f"{trip}: calls"] < now[f"{trip}, limits and event log: calls"]
        assert now[f"{trip}: lines of the files of its calls"] > now[f"{trip}: files of its calls"]
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("modules  ")]
    assert row == ["modules", "12345", f"{now['modules']:g}"]

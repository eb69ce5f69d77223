"""Programs that a tool starts end with it."""

import subprocess
import sys

import pytest

from benchmarks.processes import ROOT

TOOL = """
from benchmarks.processes import bound
child = bound(["sleep", "600"])
print("started", flush=True)
child.wait()
"""


@pytest.mark.parametrize("number", [9, 15])
def test_what_a_tool_has_started_ends_with_it_however_it_ends(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", TOOL], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "started\n"
        tool.send_signal(number)
        assert tool.stdout.read() == "", "once nobody has it open, the program is gone"

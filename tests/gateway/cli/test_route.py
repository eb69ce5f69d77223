"""How `sluice route` is asked; what it does is in tests/end_to_end/test_route.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.server_process import ROOT, sluice


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "one of the arguments --replicas --replicas-dns --replicas-store is required"),
        (("--replicas", "none.yaml"), "--replicas none.yaml: No such file or directory"),
        (("--replicas-dns", "name:80"), "'name:80' is no NAME:PORT:ADMIN, such as replicas.internal:8000:8001"),
        (("--replicas-dns", "a..b:80:81"), "'a..b:80:81' is no NAME:PORT:ADMIN, such as replicas.internal:8000:8001"),
        (("--replicas-dns", "name:80:81", "--state-interval", "2"), "'2' is no interval: 0.01 to 1 seconds"),
        (("--replicas-dns", "name:80:81", "--routing", "best"), "invalid choice: 'best'"),
    ],
)
def test_contradictory_settings_are_refused_before_anything_is_served(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    asked = sluice("route", *flags, "--port", "0", "--admin-port", "off", "--state-dir", tmp_path)
    assert asked.returncode == 2
    assert said in asked.stderr


def test_a_router_needs_a_file_for_each_side_of_a_connection(tmp_path: Path) -> None:
    flags = ("--replicas-dns", "name:80:81", "--state-dir", str(tmp_path), "--max-connections", "300")
    command = f'ulimit -n 500 && exec "{sys.executable}" -m sluice route {" ".join(flags)}'
    asked = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert asked.returncode == 2
    assert "--max-connections 300 needs 600 + 96 open files in a router" in asked.stderr

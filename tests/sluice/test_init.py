import subprocess
import sys

import pytest

import backend
import sluice
import sluice.__main__


def test_the_public_names_are_the_engines() -> None:
    assert sluice.LLM is backend.LLM
    assert sluice.SamplingParams is backend.SamplingParams
    assert sluice.Completion is backend.Completion
    assert sluice.__all__ == backend.__all__


def test_an_internal_class_is_no_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = sluice.Engine


def test_the_import_alone_brings_no_torch() -> None:
    code = "import sys, sluice; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "sluice", "version"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "sluice")


def test_the_command_takes_arguments_like_the_one_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice.__main__.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("sluice ")

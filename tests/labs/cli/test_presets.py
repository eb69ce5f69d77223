"""The example policies, with the engine flags that each names, serve what they are for."""

import re
from pathlib import Path

import pytest

from gateway.cli.flags import load
from gateway.cli.main import _parser
from gateway.core import engine_options
from tests.gateway.cli.conftest import Printed
from tests.quotas.policies import EXAMPLES

PRESETS = [path for path in EXAMPLES if path.parent.name == "examples"]
TRAFFIC = {  # prompt and output tokens
    "short_chat": (200, 60),
    "long_document_rag": (6000, 80),
    "batch_summaries": (1500, 120),
    "tool_agents": (3000, 40),
    "long_context": (30_000, 60),
    "embedding_scoring": (200, 1),
}


def serve_flags(path: Path) -> list[str]:
    """The flags of the command in the file's first comment."""
    found = re.search(r"^# sluice serve --policy (\S+)((?:.|\n#   )*)", path.read_text(), re.MULTILINE)
    assert found and found[1] == path.name
    return found[2].replace("#", " ").split()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_parses_and_serves_its_traffic(path: Path, tmp_path: Path, printed: Printed) -> None:
    flags = serve_flags(path)
    words = ["serve", "--policy", str(path), *flags]
    options = engine_options(load(_parser(words).parse_args(words)))
    settings = [
        f"max_num_seqs={options.max_num_seqs}",
        f"max_num_batched_tokens={options.max_num_batched_tokens}",
        f"prefill_chunk={options.prefill_chunk}",
    ]
    prompt, output = TRAFFIC[path.stem]
    rows = [f"{4 * n},{prompt + n},{output},someone" for n in range(8)]
    trace = tmp_path / "t.csv"
    trace.write_text("\n".join(["time,prompt,output,tenant", *rows]))
    out = printed("simulate", "--trace", trace, "--columns", "time=time,prompt=prompt,output=output",
                  "--policy", ",".join([str(path), *settings]))  # fmt: skip
    figures = dict(re.findall(r"^  (goodput|completed) +([\d.]+)", out, re.MULTILINE))
    assert figures == {"goodput": "100.0", "completed": "8"}

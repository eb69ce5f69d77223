"""Servers that several modules share; each is started when the first test asks for it."""

from collections.abc import Iterator

import pytest

from backend.hub import resolve_model
from backend.model_config import read_model_config
from backend.tokenizer import Tokenizer
from tests.gateway.server_process import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The gateway as a newcomer starts it."""
    with running_server(tmp_path_factory.mktemp("server"), "--threads", "1") as process:
        yield process


@pytest.fixture(scope="session")
def impatient_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One whose limits on slow and on many clients are small enough to be met in a test."""
    limits = {
        "--header-timeout": "1",
        "--body-timeout": "1",
        "--idle-timeout": "1",
        "--write-timeout": "1",
        "--max-connections": "24",
        "--max-num-seqs": "4",
    }
    flags = [word for pair in limits.items() for word in pair]
    with running_server(tmp_path_factory.mktemp("impatient"), "--threads", "1", *flags) as process:
        yield process


@pytest.fixture(scope="session")
def embedded_tokenizer() -> Iterator[Tokenizer]:
    directory = resolve_model("embedded")
    tokenizer = Tokenizer.from_dir(directory, read_model_config(directory).vocab_size)
    yield tokenizer
    tokenizer.close()

"""Which tests run, and the servers that several modules share; each is started when the first test asks for it."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings
from redis import Redis

from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
from backend.text.tokenizer import Tokenizer
from gateway.settings.machine import GC_THRESHOLDS
from tests.examples import NIGHTLY
from tests.gateway.server_process import PATIENCE, ServerProcess, running_server
from tests.gateway.stoppable_store import StoppableStore
from tests.gateway.warm_interpreter import make_trusting_once
from tests.quotas.servers import BINARIES, running

PAGES = "tests/end_to_end/page/"  # in one process, with one browser
LONGEST = ("tests/backend/kernels/test_triton_ops.py", PAGES)
WAITING = ("tests/test_", "tests/end_to_end/")  # files whose tests wait for programs that they have started
UNHURRIED = ("--refused-per-second", "10000")  # tests send what is refused one after the other

# A machine that is busy with something else fails no test: Hypothesis measures no time.
patient = [HealthCheck.too_slow]
settings.register_profile("daily", deadline=None, suppress_health_check=patient, max_examples=50)
settings.register_profile(NIGHTLY, deadline=None, suppress_health_check=patient, max_examples=1000, derandomize=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run what is marked nightly, and more random examples")


def pytest_configure(config: pytest.Config) -> None:
    unhurried = httpx._config.DEFAULT_TIMEOUT_CONFIG  # of calls that name no timeout, also of functions: else 5 s
    unhurried.connect = unhurried.read = unhurried.write = unhurried.pool = PATIENCE
    settings.load_profile(NIGHTLY if config.getoption("--all") else "daily")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, which would be idle while tests wait for what they have started."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = _places(list(dict.fromkeys(_file_of(item) for item in items)))
    items.sort(key=lambda item: place[_file_of(item)])
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="this machine has no GPU: see scripts/gpu_box"))
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _places(files: list[str]) -> dict[str, int]:
    """Return each file's place in the run. Files that wait are spread over most of it, so that of three workers one or
    two compute meanwhile, and the last part is of short files, so that all workers end together.
    """
    longest = [file for file in files if file.startswith(LONGEST)]
    waiting = [file for file in files if file.startswith(WAITING) and file not in longest]
    others = [file for file in files if file not in longest and file not in waiting]
    share = 4 * len(others) // (5 * max(1, len(waiting)))
    mixed = [one for n, file in enumerate(waiting) for one in (file, *others[n * share : (n + 1) * share])]
    return {file: place for place, file in enumerate([*longest, *mixed, *others[len(waiting) * share :]])}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one process, and all tests of pages."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - a machine with a GPU may have none

    class FilesAndPages(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return PAGES if nodeid.startswith(PAGES) else super()._split_scope(nodeid)

    return FilesAndPages(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection() -> None:
    gc.disable()  # what is imported and collected stays


def pytest_collection_finish() -> None:
    """Prepare what every test would pay for.

    A full collection of garbage looks at a million objects that stay, and by default a young one comes every 700. Six
    times a test, pytest adds a handler to each logger that does not propagate: torch alone has fifty.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.name.startswith(("torch", "transformers")):
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what is written in C++ tells of its objects as leaked


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", make_trusting_once())
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The gateway as a newcomer starts it."""
    with running_server(tmp_path_factory.mktemp("server"), "--threads", "1", *UNHURRIED) as process:
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
        "--overload": "unbounded",  # or it refuses, on a slow machine, what is to be seen waiting
        "--refused-per-second": "10000",
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


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(BINARIES["valkey"], tmp_path_factory.mktemp("quotas")) as url:
        yield url


@pytest.fixture
def redis_url(_server: str) -> str:
    """A store that knows nothing yet."""
    with Redis.from_url(_server) as client:
        client.flushall()
    return _server


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppableStore]:
    """Runs, until the test does something about that."""
    store = StoppableStore(tmp_path_factory.mktemp("store") / "s")
    store.start()
    yield store
    store.signal(signal.SIGCONT)
    store.kill()

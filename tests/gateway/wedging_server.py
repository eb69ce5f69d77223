"""`sluice` on a device that hangs after some steps, uninterruptibly for its process."""

import sys
import threading
from dataclasses import replace
from typing import Any

from backend.loader import LoadedModel, load_model
from backend.scheduler.batch import Batch
from backend.worker.executor import PendingStep
from backend.worker.model_runner import ModelRunner
from gateway import app
from gateway.cli.main import main

NUM_STEPS = 40


class WedgingRunner:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> PendingStep:
        self._num_steps += 1
        if self._num_steps > NUM_STEPS:
            threading.Event().wait()
        return self._runner.launch(batch)


def load_wedging(*given: Any, **named: Any) -> LoadedModel:
    model = load_model(*given, **named)
    runner: Any = WedgingRunner(model.runner)
    return replace(model, runner=runner)


if __name__ == "__main__":
    app.load_model = load_wedging
    sys.exit(main())

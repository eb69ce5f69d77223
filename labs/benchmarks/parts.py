"""Samples the work of the event loop's thread, by part of the gateway."""

import inspect
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib import import_module
from types import CodeType, FrameType
from typing import Any

INTERVAL = 0.001  # seconds between two samples

PARTS: Mapping[str, Sequence[str]] = {
    "accept, head": ["gateway.http.connection:HttpConnection.data_received"],
    "auth": ["gateway.api.endpoint:Endpoint.authenticate", "gateway.api.frontend:Frontend.policy"],
    "body": ["gateway.api.endpoint:Endpoint.read"],
    "template": ["gateway.api.frontend:Frontend.render"],
    "tokenize": ["gateway.api.frontend:Frontend.encode"],
    "limits": [f"gateway.api.in_process_client:InProcessClient.{name}" for name in ("_prepare", "_reserve")],
    "admit": ["admission.controller:Controller.arrive"],
    "plan": ["admission.controller:Controller.schedule"],
    "launch": ["backend.step_loop:StepLoop.schedule"],
    "account": ["admission.controller:Controller.update_from_output"],
    "step, else": ["backend.engine:Engine._on_step", "backend.engine:Engine._schedule"],
    "deliver": ["backend.engine:Engine._deliver", "backend.stream:Delivery._drain"],
    "text": ["gateway.api.generation:TextStream.pieces", "gateway.api.generation:TextStream.choice"],
    "write": [f"gateway.http.responses:ResponseWriter.{name}" for name in ("reply", "stream", "end_stream")],
    "settle": ["gateway.api.in_process_client:InProcessGeneration.settle_now"],
    "record": [f"gateway.telemetry.request_record:Telemetry.{name}" for name in ("begin", "ended")],
    "request, else": ["gateway.api.endpoint:Endpoint.__call__"],
}
"""The functions that mark each part. What none of them calls is the event loop's: polling, reading, timers."""


class PartSampler:
    """Looks at the main thread every millisecond, and counts the part whose marker is nearest to what runs there.

    All that a marker calls is its part's, libraries included, unless it marks a part of its own. So is what awaits in
    it, since the frames of a chain of coroutines are all on the stack while the last of them runs. Where the core is
    compiled, what it does is its caller's: planning and accounting are "step, else".
    """

    def __init__(self, parts: Mapping[str, Sequence[str]] = PARTS) -> None:
        """Each marker is `module:qualified name`. Raises `AttributeError` where one does not exist any more."""
        self.samples: Counter[str] = Counter()
        codes = {_code_of(marker): part for part, markers in parts.items() for marker in markers}
        self._part_of = {code: part for code, part in codes.items() if code is not None}

    def start(self) -> None:
        """Take samples from now on. Call it on the main thread."""
        signal.signal(signal.SIGALRM, self.sample)
        signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)

    def sample(self, _: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code not in self._part_of:
            frame = frame.f_back
        self.samples[self._part_of[frame.f_code] if frame else "loop"] += 1


def _code_of(marker: str) -> CodeType | None:
    """Returns the code of a marker; None where it is compiled, and has no frame that a sample could find."""
    module, _, name = marker.partition(":")
    function: Any = reduce(getattr, name.split("."), import_module(module))
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return code

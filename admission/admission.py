"""The door between a request's scope and the engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from admission.request import Request
from backend.engine import Engine
from backend.sequence import FinishReason, Sequence
from backend.stream import TokenStream


class Admission:
    """Admits requests to one engine. Entering queues the request, leaving the block ends it, whatever happened."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def admit(self, request: Request) -> Iterator[TokenStream]:
        """The request's tokens. Raises `Refused` when it may not enter, `DeviceError` when the engine has failed."""
        sequence = Sequence(
            request.id,
            request.tenant,
            request.prompt,
            request.sampling,
            request.max_tokens,
            request.seed,
            request.end_tokens,
        )
        stream = self._engine.submit(sequence)
        try:
            yield stream
        finally:
            self._engine.finish(sequence)

    def stop(self, stream: TokenStream) -> None:
        """Its text has reached a stop string: no more tokens are wanted."""
        self._engine.finish(stream.sequence, FinishReason.STOP)

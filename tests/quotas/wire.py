"""The way from one replica to a store, as a test cuts it, and loses answers on it."""

from collections.abc import Callable

from quotas.errors import NotSent, QuotaError, StoreUnavailable
from quotas.store.redis_client import RedisClient
from quotas.store.scripts import Script, ScriptRunner


class Wire(ScriptRunner):
    """Over the connection of another runner."""

    def __init__(self, runner: ScriptRunner) -> None:
        self.scripts = runner.scripts
        self.on_command = runner.on_command
        self.client: RedisClient = runner.client
        self.is_cut = False
        self.cut: QuotaError = NotSent("the wire is cut")  # of calls on a cut wire
        self.losses = 0  # of the next answers, those that do not arrive
        self.loss: QuotaError = StoreUnavailable("the answer was lost")  # instead of them

    async def run_once(self, script: Script, packed: bytes) -> list[bytes]:
        self._check()
        return self._arrived(await super().run_once(script, packed))

    async def run(self, script: Script, packed: bytes) -> list[bytes]:
        self._check()
        return self._arrived(await super().run(script, packed))

    def submit(self, script: Script, packed: bytes, answered: Callable[[list[bytes] | Exception], object]) -> bool:
        def arrived(answer: list[bytes] | Exception) -> None:
            try:
                outcome = answer if isinstance(answer, Exception) else self._arrived(answer)
            except QuotaError as lost:
                outcome = lost
            answered(outcome)

        return not self.is_cut and super().submit(script, packed, arrived)

    def _check(self) -> None:
        if self.is_cut:
            raise self.cut

    def _arrived(self, answer: list[bytes]) -> list[bytes]:
        if not self.losses:
            return answer
        self.losses -= 1
        raise self.loss

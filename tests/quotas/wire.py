"""The way from one replica to a store, as a test cuts it, and loses answers on it."""

from quotas.errors import StoreUnavailable
from quotas.store.redis_client import RedisClient
from quotas.store.scripts import Script, ScriptRunner


class Wire(ScriptRunner):
    """Over the connection of another runner."""

    def __init__(self, runner: ScriptRunner) -> None:
        self.scripts = runner.scripts
        self.on_command = runner.on_command
        self.client: RedisClient = runner.client
        self.is_cut = False
        self.losses = 0  # of the next answers, those that do not arrive

    async def run_once(self, script: Script, packed: bytes) -> list[bytes]:
        self._check()
        return self._arrived(await super().run_once(script, packed))

    async def run(self, script: Script, packed: bytes) -> list[bytes]:
        self._check()
        return self._arrived(await super().run(script, packed))

    def _check(self) -> None:
        if self.is_cut:
            raise StoreUnavailable("the wire is cut")

    def _arrived(self, answer: list[bytes]) -> list[bytes]:
        if not self.losses:
            return answer
        self.losses -= 1
        raise StoreUnavailable("the answer was lost")

"""What lua/exchange.lua does, on paper: a store of served sums that tests run on a clock of their own."""

from dataclasses import dataclass, field

from quotas.store.scripts import Script


@dataclass(slots=True)
class PaperSums:
    """In place of a `ScriptRunner`, for all replicas of one fleet. `now` is in seconds."""

    now: float = 0.0
    sums: dict[bytes, int] = field(default_factory=dict)
    changed: dict[bytes, int] = field(default_factory=dict)
    replicas: dict[bytes, tuple[int, float]] = field(default_factory=dict)  # ordinals, and when they were heard of
    version: int = 0

    async def call(self, script: Script, keys: tuple[bytes, ...], *arguments: bytes) -> list[bytes]:
        replica, ordinal, read, counts, _, *words = arguments
        assert script is Script.EXCHANGE
        last, _ = self.replicas.get(replica, (0, 0.0))
        if int(ordinal) > last:
            self.version += 1
            for tenant, more in zip(words[::2], words[1::2], strict=True):
                assert int(more) > 0, "sums never fall"
                self.sums[tenant] = self.sums.get(tenant, 0) + int(more)
                self.changed[tenant] = self.version
        self.replicas[replica] = max(last, int(ordinal)), self.now
        live = sum(heard >= self.now - int(counts) / 1e6 for _, heard in self.replicas.values())
        answer = [b"%d" % self.version, b"%d" % live]
        if read:
            since = [tenant for tenant, version in self.changed.items() if version > int(read)]
            answer += [word for tenant in since for word in (tenant, b"%d" % self.sums[tenant])]
        return answer

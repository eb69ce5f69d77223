"""How much work something is, in every unit that a queue is bounded in."""

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """Requests, uncomputed tokens, bytes of their bodies, and predicted seconds of the engine's time."""

    count: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.count + other.count, self.tokens + other.tokens, self.bytes + other.bytes, self.seconds + other.seconds
        )

    def add(self, other: "Load") -> None:
        self.count += other.count
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.seconds += other.seconds

    def take(self, other: "Load") -> None:
        """Nothing at all is exactly nothing, whatever rounding left behind."""
        self.count -= other.count
        self.tokens -= other.tokens
        self.bytes -= other.bytes
        self.seconds = max(0.0, self.seconds - other.seconds) if self.count else 0.0

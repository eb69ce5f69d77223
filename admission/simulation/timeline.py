"""A quantity over time in bounded memory: the largest value of each interval, intervals as long as they need be."""

MOST_INTERVALS = 240


class Timeline:
    """Takes values at times that never go back. `values[i]` is the largest within the i-th `interval` seconds."""

    def __init__(self, interval: float = 0.125) -> None:
        self.interval = interval
        self.values: list[float] = []

    def add(self, time: float, value: float) -> None:
        index = int(time / self.interval)
        if index >= len(self.values):
            while index >= MOST_INTERVALS:
                self._halve()
                index = int(time / self.interval)
            self.values += [0.0] * (index + 1 - len(self.values))
        self.values[index] = max(self.values[index], value)

    def _halve(self) -> None:
        self.interval *= 2
        self.values = [max(self.values[n : n + 2]) for n in range(0, len(self.values), 2)]

"""How many tokens a step may have: what is configured, or less for a while after the device had no memory for more."""

RECOVERY = 1024  # steps in which a budget that was next to nothing is whole again
MOST_LOSSES = 16  # in a row, which take any budget down to one token and leave some to wait for memory


class TokenBudget:
    """Halved by a step that is lost, raised a little by each that is computed (additive increase, multiplicative
    decrease: Chiu and Jain, 1989).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = float(most)
        self._losses = 0  # in a row

    @property
    def tokens(self) -> int:
        """At least one."""
        return int(self._size)

    def computed(self) -> None:
        """A step was."""
        self._losses = 0
        self._size = min(self._size + self._most / RECOVERY, float(self._most))

    def lost(self, tokens: int) -> bool:
        """A step of so many tokens was; False when that has gone on for too long."""
        self._losses += 1
        self._size = max(1.0, min(self.tokens, tokens) / 2)
        return self._losses <= MOST_LOSSES

    def restore(self) -> bool:
        """Nothing fits what is left of it: try the whole again. Whether it was less."""
        was_less, self._size = self._size < self._most, float(self._most)
        return was_less

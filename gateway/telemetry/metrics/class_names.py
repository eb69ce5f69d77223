"""What the policy in force calls the classes of service that the engine numbers."""

from gateway.policies import Policies


class ClassNames:
    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    def all(self) -> list[str]:
        """The most urgent first."""
        return [entry.name for entry in self._policies.current.classes]

    def of(self, level: int) -> str:
        """A class that a newer policy has no more goes by the name of the last one."""
        classes = self._policies.current.classes
        return classes[min(level, len(classes) - 1)].name

"""The core's invariants in any interleaving; `scripts/prove_core.py` runs far more examples of the same machine."""

from hypothesis import settings

from tests.admission.core_machine import CoreMachine

TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=2000, stateful_step_count=30, deadline=None)

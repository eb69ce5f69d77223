"""Metrics of grammars are those of the compiler, of the masks and of the scheduler."""

from backend.errors import GrammarInvalid
from backend.scheduler.batch import Counters
from backend.structured_output.compiler import GrammarCompiler
from backend.structured_output.masks import TokenMasks
from gateway.telemetry.metrics.grammars import GrammarSources, count_grammars
from gateway.telemetry.metrics.registry import Registry
from tests.backend.structured_output.grammars import PERSON, regex, running_processes


def test_results_of_grammars_are_counted() -> None:
    with running_processes() as processes:
        compiler, masks, registry = GrammarCompiler(processes), TokenMasks(processes), Registry()
        count_grammars(registry, GrammarSources(compiler, masks), Counters(jump_forward_tokens=7))
        for grammar in (PERSON, PERSON, regex("(a")):
            try:
                compiler.compile_now(grammar)
            except GrammarInvalid:
                continue
        read = {reading.family.name: dict(reading.points) for reading in registry.collect()}
    assert read["sluice.grammars"] == {("compiled",): 1, ("cached",): 1, ("invalid",): 1, ("too_complex",): 0}
    assert read["sluice.jump_forward_tokens"] == {(): 7}
    assert read["sluice.grammar.compile"][()] > 0

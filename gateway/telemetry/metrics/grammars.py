"""Metrics of constrained answers: the cost of compiling and matching grammars, and the outcomes."""

from collections.abc import Callable
from dataclasses import dataclass

from backend.scheduler.batch import Counters
from backend.structured_output.compiler import GrammarCompiler
from backend.structured_output.masks import TokenMasks
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry


@dataclass(frozen=True, slots=True)
class GrammarSources:
    """The sources of the grammars' metrics."""

    compiler: GrammarCompiler
    masks: TokenMasks


def count_grammars(registry: Registry, sources: GrammarSources | None, counters: Counters) -> None:
    """Register the metrics of grammars; without sources all are 0."""

    def total(name: str, meaning: str, read: Callable[[GrammarSources], float], unit: str = "") -> None:
        registry.total(name, meaning, lambda: 0 if sources is None else read(sources), unit)

    def compiled() -> list[Point]:
        counts = (0, 0, 0, 0)
        if sources is not None:
            compiler = sources.compiler
            counts = (compiler.num_misses, compiler.num_hits, compiler.num_invalid, compiler.num_too_complex)
        ends = zip(("compiled", "cached", "invalid", "too_complex"), counts, strict=True)
        return [((end,), count) for end, count in ends]

    asked = Family(
        "sluice.grammars", Kind.COUNTER, "", "Grammars that requests asked for, by what came of it.", ("end",)
    )
    registry.read(asked, compiled)
    total("sluice.grammar.compile", "Processor time to compile grammars.", lambda one: one.compiler.seconds, "s")
    total(
        "sluice.grammar.mask",
        "Processor time of grammar processes for masks.",
        lambda one: one.masks.processes.mask_time.seconds,
        "s",
    )
    total("sluice.grammar.rows", "Rows of steps that had a mask.", lambda one: one.masks.num_rows)
    total("sluice.grammar.failures", "Rows that no token could follow.", lambda one: one.masks.num_failures)
    total("sluice.grammar.restarts", "Grammar processes that ended.", lambda one: one.masks.processes.num_restarts)
    registry.total("sluice.jump_forward_tokens", "Tokens that grammars forced.", lambda: counters.jump_forward_tokens)

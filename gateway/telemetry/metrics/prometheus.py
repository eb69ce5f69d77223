"""Metrics in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4)."""

import asyncio
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

from gateway.telemetry.metrics.registry import Distribution, Family, Labels, Reading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SERIES_PER_TURN = 200  # written between two turns of the event loop: about a millisecond


def exposition(readings: Iterable[Reading], constant: tuple[tuple[str, str], ...] = ()) -> bytes:
    """One page. Each series carries the `constant` labels before its own."""
    first = _pairs(tuple(name for name, _ in constant), tuple(value for _, value in constant))
    lines: list[str] = []
    for reading in readings:
        lines += _family_lines(reading, first)
    lines.append("")
    return "\n".join(lines).encode()


async def exposition_in_turns(readings: Iterable[Reading], constant: tuple[tuple[str, str], ...] = ()) -> bytes:
    """As `exposition`, while the event loop runs other callbacks: with a hundred tenants a page has thousands of
    series.
    """
    pages, waiting, count = list[bytes](), list[Reading](), 0
    for reading in readings:
        waiting.append(reading)
        count += len(reading.points)
        if count >= SERIES_PER_TURN:
            pages.append(exposition(waiting, constant))
            waiting, count = [], 0
            await asyncio.sleep(0)
    return b"".join([*pages, exposition(waiting, constant)])


def _family_lines(reading: Reading, constant: str) -> Iterator[str]:
    family = reading.family
    name, names = family.prometheus_name, family.prometheus_labels
    yield f"# HELP {name} {_escaped_help(family.meaning)}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value in reading.points:
        pairs = _joined(constant, _pairs(names, labels))
        if isinstance(value, Distribution):
            yield from _histogram_lines(family, name, pairs, value)
        else:
            yield f"{name}{{{pairs}}} {value:.15g}"


def _histogram_lines(family: Family, name: str, pairs: str, value: Distribution) -> Iterator[str]:
    totals = list(accumulate(value.counts))
    for bound, total in zip(_bounds(family.bounds), totals, strict=True):
        yield f"{name}_bucket{{{_joined(pairs, bound)}}} {total}"
    yield f"{name}_sum{{{pairs}}} {value.sum:.15g}"
    yield f"{name}_count{{{pairs}}} {totals[-1]}"


def _joined(pairs: str, more: str) -> str:
    return f"{pairs},{more}" if pairs and more else pairs or more


@lru_cache(maxsize=64)
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*(f'le="{bound:g}"' for bound in bounds), 'le="+Inf"')


@lru_cache(maxsize=16_384)
def _pairs(names: tuple[str, ...], values: Labels) -> str:
    """An empty value is the same as no label."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True) if value)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").encode("utf-8", "replace").decode()


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")

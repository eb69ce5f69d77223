"""The `classes:` of a policy file."""

from quotas import units, words
from quotas.default_policy import AGING_STEP, BATCH_AGING, CLASSES
from quotas.policy import ClassPolicy, Lateness, QueueBounds
from quotas.policy_schema import MAX_CLASSES, fields_of
from quotas.problems import quoted
from quotas.section import Section


def read_classes(section: Section | None) -> tuple[ClassPolicy, ...]:
    if section is None:
        return CLASSES
    if not 1 <= len(section.names) <= MAX_CLASSES:
        section.note(section.mark, section.path, f"has {len(section.names)} classes, not 1 to {MAX_CLASSES}")
        return CLASSES
    classes: list[ClassPolicy] = []
    for name, _, fields in section.sections(words.class_name):
        classes.append(_read_class(fields, name, classes))
    return tuple(classes) or CLASSES


def _read_class(section: Section, name: str, above: list[ClassPolicy]) -> ClassPolicy:
    section.refuse_strangers(fields_of("class"))
    tiers = section.values("service_tiers", words.service_tier, ())
    for other in above:
        for tier in set(tiers) & set(other.service_tiers):
            section.wrong("service_tiers", f"{quoted(tier)} asks for class {other.name} already")
    return ClassPolicy(
        name=name,
        level=len(above),
        service_tiers=tuple(sorted(tiers)),
        ttft=section.value("ttft", units.positive_duration, None),
        time_per_output_token=section.value("time_per_output_token", units.positive_duration, None),
        aging=_read_aging(section, above),
        queue=_read_queue(section.section("queue")),
        when_late=_read_lateness(section),
    )


def _read_lateness(section: Section) -> Lateness:
    lateness: Lateness = section.value("when_late", words.lateness, "wait")
    if lateness == "refuse" and "ttft" not in section.names:
        section.wrong("when_late", "needs a ttft: without a target nothing is late")
    return lateness


def _read_aging(section: Section, above: list[ClassPolicy]) -> float:
    aging = section.value("aging", units.duration, _default_aging(section, above))
    if not above and aging:
        section.wrong("aging", "the first class is overtaken by none: leave it out")
    if above and aging < above[-1].aging:
        section.wrong("aging", f"is shorter than that of {above[-1].name}, which is more urgent")
    return aging


def _default_aging(section: Section, above: list[ClassPolicy]) -> float:
    """A class without targets is for batch work."""
    if not above:
        return 0.0
    step = above[-1].aging + AGING_STEP
    return step if {"ttft", "time_per_output_token"} & set(section.names) else max(step, BATCH_AGING)


def _read_queue(section: Section | None) -> QueueBounds:
    if section is None:
        return QueueBounds()
    section.refuse_strangers(fields_of("class", "queue"))
    return QueueBounds(
        requests=section.value("requests", units.count, None),
        tokens=section.value("tokens", units.count, None),
        bytes=section.value("bytes", units.size, None),
        seconds=section.value("seconds", units.positive_duration, None),
    )
